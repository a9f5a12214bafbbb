#pragma once
/// The settings of a launch by name, for all that goes through them: files, flags over files, other machines.

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "tessera/launch/settings.hpp"

namespace tessera::launching {

template <typename T>
struct SettingField {
  const char* name;
  std::optional<T> LaunchSettings::*member;
};

/// The keys of a native file.
inline constexpr std::tuple kSettingFields{
    SettingField<std::int64_t>{"num_processes", &LaunchSettings::num_processes},
    SettingField<std::int64_t>{"num_machines", &LaunchSettings::num_machines},
    SettingField<std::int64_t>{"machine_rank", &LaunchSettings::machine_rank},
    SettingField<std::string>{"main_process_ip", &LaunchSettings::main_process_ip},
    SettingField<std::int64_t>{"main_process_port", &LaunchSettings::main_process_port},
    SettingField<std::string>{"hostfile", &LaunchSettings::hostfile},
    SettingField<std::string>{"include", &LaunchSettings::include},
    SettingField<std::string>{"exclude", &LaunchSettings::exclude},
    SettingField<std::int64_t>{"ssh_port", &LaunchSettings::ssh_port},
    SettingField<std::string>{"export_env", &LaunchSettings::export_env},
    SettingField<std::int64_t>{"max_restarts", &LaunchSettings::max_restarts},
    SettingField<double>{"restart_delay_s", &LaunchSettings::restart_delay_s},
    SettingField<std::int64_t>{"threads_per_process", &LaunchSettings::threads_per_process},
    SettingField<std::string>{"log_dir", &LaunchSettings::log_dir},
    SettingField<std::string>{"secret_file", &LaunchSettings::secret_file},
    SettingField<bool>{"allow_secret_mode", &LaunchSettings::allow_secret_mode},
    SettingField<double>{"grace_s", &LaunchSettings::grace_s},
    SettingField<double>{"join_timeout_s", &LaunchSettings::join_timeout_s},
    SettingField<bool>{"cpu", &LaunchSettings::cpu},
    SettingField<bool>{"quiet", &LaunchSettings::quiet},
    SettingField<bool>{"pin_cores", &LaunchSettings::pin_cores},
};

/// Calls `visit` with every field.
template <typename Visit>
void each_setting(const Visit& visit) {
  std::apply([&](const auto&... field) { (visit(field), ...); }, kSettingFields);
}

}  // namespace tessera::launching
