#pragma once
/// The vocabulary of `accelerate launch`: which of its flags Tessera follows, warns about or
/// refuses.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launch/accelerate_keys.hpp"
#include "tessera/launch/settings.hpp"

namespace tessera::launching {

/// The flags that are not of Tessera's launcher.
struct AccelerateFlags {
  bool multi_gpu = false, use_megatron_lm = false, use_deepspeed = false, debug = false, same_network = false;
  bool enable_cpu_affinity = false;
  bool dynamo_use_fullgraph = false, dynamo_use_dynamic = false, dynamo_use_regional_compilation = false;
  std::optional<std::string> mixed_precision, gpu_ids, tee, role, rdzv_backend, rdzv_conf;
  std::optional<std::string> deepspeed_multinode_launcher;
  std::optional<std::string> dynamo_backend, dynamo_mode, monitor_interval, gradient_accumulation_steps;
  std::vector<std::optional<std::string>> megatron =
      std::vector<std::optional<std::string>>(megatron_keys().size());  ///< in the order of megatron_keys()
  std::vector<std::optional<std::string>> deepspeed =
      std::vector<std::optional<std::string>>(deepspeed_keys().size());  ///< in the order of deepspeed_keys()
};

/// What the flags say. Errors: ConfigError, one line per fault.
LaunchSettings settings_of(const AccelerateFlags& flags);

/// Why a flag of Accelerate's that Tessera does not have is refused; empty if it is none of Accelerate's.
/// `flag` may be written with '-' or '_'.
std::string foreign_flag(std::string_view flag);

/// The file that is read when none is named: the one that `tessera config` writes, or else the one that
/// `accelerate config` writes; nullopt if there is neither. `environment`: "NAME=value".
std::optional<std::string> default_launch_file(const std::vector<std::string>& environment);

}  // namespace tessera::launching
