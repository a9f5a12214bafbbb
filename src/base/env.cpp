#include "tessera/base/env.hpp"

#include <array>
#include <charconv>
#include <cstdlib>
#include <map>

#include "base/suggest.hpp"

extern char** environ;

namespace tessera {

namespace {

constexpr std::array kVariables{
    EnvironmentVariable{"RANK", "number of this process among all, from 0"},
    EnvironmentVariable{"WORLD_SIZE", "number of processes in all"},
    EnvironmentVariable{"LOCAL_RANK", "number of this process on its machine, from 0"},
    EnvironmentVariable{"LOCAL_WORLD_SIZE", "number of processes on this machine"},
    EnvironmentVariable{"MASTER_ADDR", "machine of rank 0, where the processes meet"},
    EnvironmentVariable{"MASTER_PORT", "port of that meeting point"},
    EnvironmentVariable{"TESSERA_STORE", "`host:port` of the store that the launcher serves"},
    EnvironmentVariable{"TESSERA_JOB_SECRET", "secret of the job: whoever has it may join"},
    EnvironmentVariable{"TESSERA_REQUIRE_SECRET", "1: a job of several machines without a secret is refused"},
    EnvironmentVariable{"TESSERA_COMM_ADDRESS",
                        "address of this machine under which other processes reach it"},
    EnvironmentVariable{"TESSERA_CHECK_COLLECTIVES",
                        "1: ranks compare what they call before each collective"},
    EnvironmentVariable{"TESSERA_RESTART", "how often the launcher has started the job again"},
    EnvironmentVariable{"TESSERA_PROGRESS", "the launcher's pipe for how far a process has come"},
    EnvironmentVariable{"NO_COLOR", "any value but the empty one: no colours on the terminal"},
    EnvironmentVariable{"TESSERA_LOG_LEVEL", "debug, info, warning or error"},
    EnvironmentVariable{"TESSERA_THREADS", "CPU threads per process where `device.threads` is 0"},
    EnvironmentVariable{"TESSERA_MAX_CPU_ISA",
                        "widest instruction set of CPU kernels: baseline, avx2, avx512"},
    EnvironmentVariable{"TESSERA_PYTHON", "the Python interpreter for the commands that need one"},
    EnvironmentVariable{"CUDA_DEVICE_MAX_CONNECTIONS",
                        "hardware queues of a GPU; the launcher sets 32 for its workers"},
};

constexpr std::string_view kPrefix = "TESSERA_";

/// Rounds of libgomp's waiting loop, each of one pause instruction: 10 to 45 ns. The same in
/// python/tessera/launch/thread_waits.py.
constexpr const char* kSpinCount = "2000";

/// Reads variables one by one and collects what is wrong with them.
class Reader {
 public:
  explicit Reader(std::span<const std::string> variables) {
    for (const std::string& variable : variables) {
      const auto equals = variable.find('=');
      if (equals != std::string::npos)
        values_.emplace(variable.substr(0, equals), variable.substr(equals + 1));
    }
  }

  std::optional<std::string> text(const char* name) const {
    const auto found = values_.find(name);
    if (found == values_.end() || found->second.empty()) return std::nullopt;
    return found->second;
  }

  std::optional<std::int64_t> integer(const char* name, std::int64_t min, std::int64_t max) {
    const auto value = text(name);
    if (!value) return std::nullopt;
    std::int64_t number = 0;
    const char* end = value->data() + value->size();
    const auto [stop, error] = std::from_chars(value->data(), end, number);
    if (error != std::errc() || stop != end || number < min || number > max) {
      fault(name, " must be an integer from ", min, " to ", max, ", not '", *value, "'");
      return std::nullopt;
    }
    return number;
  }

  /// "0" or "1".
  bool flag(const char* name) { return integer(name, 0, 1).value_or(0) == 1; }

  template <typename... Parts>
  void fault(const Parts&... parts) {
    faults_ += detail::concat(faults_.empty() ? "" : "\n", "environment variable ", parts...);
  }

  std::vector<std::string> unknown() const {
    std::vector<std::string_view> known;
    for (const EnvironmentVariable& variable : kVariables) {
      if (std::string_view(variable.name).starts_with(kPrefix)) known.emplace_back(variable.name);
    }
    std::vector<std::string> warnings;
    for (const auto& [name, value] : values_) {
      if (!name.starts_with(kPrefix)) continue;
      bool is_known = false;
      for (const std::string_view candidate : known) is_known = is_known || candidate == name;
      if (!is_known) {
        warnings.push_back("environment variable " + name + " means nothing to Tessera" +
                           suggest(name, known));
      }
    }
    return warnings;
  }

  void finish() const {
    if (!faults_.empty()) throw ConfigError(faults_);
  }

 private:
  std::map<std::string, std::string> values_;
  std::string faults_;
};

void check_pair(Reader& reader, const char* rank_name, const std::optional<std::int64_t>& rank,
                const char* size_name, const std::optional<std::int64_t>& size) {
  if (rank && !reader.text(size_name)) reader.fault(rank_name, " is set but ", size_name, " is not");
  if (size && !reader.text(rank_name)) reader.fault(size_name, " is set but ", rank_name, " is not");
  if (rank && size && *rank >= *size) {
    reader.fault(rank_name, " = ", *rank, " does not fit ", size_name, " = ", *size);
  }
}

constexpr std::int64_t kHighestRank = 1 << 24;

/// The names under which one launcher tells a process its place.
struct LauncherNames {
  const char *rank, *size, *local_rank, *local_size;
};
constexpr LauncherNames kTorchrun{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
/// In order of preference. mpirun comes before srun, which it may use to start its own helpers: their numbers
/// are not the processes'.
constexpr std::array kOthers{
    LauncherNames{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                  "OMPI_COMM_WORLD_LOCAL_SIZE"},
    LauncherNames{"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    LauncherNames{"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", nullptr},
};

/// A batch script has SLURM's numbers too, but only srun makes a step.
bool is_srun(const LauncherNames& names) { return names.local_size == nullptr; }

LauncherNames launcher_of(const Reader& reader) {
  if (reader.text(kTorchrun.rank) || reader.text(kTorchrun.size)) return kTorchrun;
  for (const LauncherNames& names : kOthers) {
    if (is_srun(names) && !reader.text("SLURM_STEP_NODELIST")) continue;
    // A job of one task is a shell on a machine of the cluster: what is started there may start processes.
    if (reader.text(names.rank) && reader.text(names.size).value_or("1") != "1") return names;
  }
  return kTorchrun;
}

/// "node[03-07,9],other" -> "node03".
std::string first_host(const std::string& list) {
  std::string host;
  for (std::size_t i = 0; i < list.size() && list[i] != ','; ++i) {
    if (list[i] != '[') {
      host.push_back(list[i]);
      continue;
    }
    const std::size_t end = list.find(']', i);
    if (end == std::string::npos) return {};
    host += list.substr(i + 1, list.find_first_of("-,]", i) - i - 1);
    i = end;
  }
  return host;
}

/// Entry `index` of "4(x2),3": 4, 4, 3. Nothing if the list is not of that form or not so long.
std::optional<std::int64_t> tasks_on_node(const std::string& list, std::int64_t index) {
  std::size_t at = 0;
  const auto number = [&]() -> std::optional<std::int64_t> {
    std::int64_t value = 0;
    const auto [stop, error] = std::from_chars(list.data() + at, list.data() + list.size(), value);
    if (error != std::errc() || value < 1) return std::nullopt;
    at = static_cast<std::size_t>(stop - list.data());
    return value;
  };
  while (at < list.size()) {
    const auto tasks = number();
    std::optional<std::int64_t> nodes = 1;
    if (tasks && list.compare(at, 2, "(x") == 0) {
      at += 2;
      nodes = number();
      ++at;  // the parenthesis
    }
    if (!tasks || !nodes) return std::nullopt;
    if (index < *nodes) return tasks;
    index -= *nodes;
    ++at;  // the comma
  }
  return std::nullopt;
}

void read_place(Reader& reader, Environment& env) {
  const LauncherNames names = launcher_of(reader);
  env.rank = reader.integer(names.rank, 0, kHighestRank - 1);
  env.world_size = reader.integer(names.size, 1, kHighestRank);
  env.local_rank = reader.integer(names.local_rank, 0, kHighestRank - 1);
  const char* local_size = names.local_size;
  if (is_srun(names)) {
    local_size = "SLURM_STEP_TASKS_PER_NODE";
    env.local_world_size = tasks_on_node(reader.text(local_size).value_or(""),
                                         reader.integer("SLURM_NODEID", 0, kHighestRank).value_or(0));
  } else {
    env.local_world_size = reader.integer(local_size, 1, kHighestRank);
  }
  check_pair(reader, names.rank, env.rank, names.size, env.world_size);
  // A local rank alone is common: some launchers leave the local size to be found out.
  if (env.local_rank && env.local_world_size && *env.local_rank >= *env.local_world_size) {
    reader.fault(names.local_rank, " = ", *env.local_rank, " does not fit ", local_size, " = ",
                 *env.local_world_size);
  }
  env.torchrun = reader.text("TORCHELASTIC_RUN_ID").has_value();
  for (const char* name :
       {"TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID"}) {
    if (!env.job_id) env.job_id = reader.text(name);
  }
}

/// A pipe that is not there any more is no fault: who uses it looks.
void read_progress(const Reader& reader, Environment& env) {
  const std::string text = reader.text("TESSERA_PROGRESS").value_or("");
  const char* const end = text.data() + text.size();
  int descriptor = -1;
  const auto [colon, error] = std::from_chars(text.data(), end, descriptor);
  if (error != std::errc() || colon == end || *colon != ':') return;
  std::uint64_t inode = 0;
  const auto [stop, no_number] = std::from_chars(colon + 1, end, inode);
  if (no_number != std::errc() || stop != end || descriptor < 0) return;
  env.progress_fd = descriptor;
  env.progress_inode = inode;
}

void read_meeting_point(Reader& reader, Environment& env) {
  env.master_addr = reader.text("MASTER_ADDR");
  env.master_port = reader.integer("MASTER_PORT", 0, 65535);
  if (!env.master_addr && env.rank && env.world_size == env.local_world_size) env.master_addr = "127.0.0.1";
  if (!env.master_addr && env.rank) {
    const std::string host = first_host(reader.text("SLURM_STEP_NODELIST").value_or(""));
    if (!host.empty()) env.master_addr = host;
  }
  env.job_secret = reader.text("TESSERA_JOB_SECRET");
  env.require_secret = reader.flag("TESSERA_REQUIRE_SECRET");
  env.comm_address = reader.text("TESSERA_COMM_ADDRESS");
  env.check_collectives = reader.flag("TESSERA_CHECK_COLLECTIVES");
  const char* restart = reader.text("TESSERA_RESTART") ? "TESSERA_RESTART" : "TORCHELASTIC_RESTART_COUNT";
  env.restart = reader.integer(restart, 0, 1 << 30).value_or(0);
  const auto store = reader.text("TESSERA_STORE");
  if (!store) return;
  const std::size_t colon = store->rfind(':');
  std::string host = store->substr(0, colon == std::string::npos ? 0 : colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  const char* end = store->data() + store->size();
  const char* digits = colon == std::string::npos ? end : store->data() + colon + 1;
  const auto [stop, error] = std::from_chars(digits, end, env.store_port);
  if (host.empty() || error != std::errc() || stop != end || env.store_port < 1 || env.store_port > 65535) {
    reader.fault("TESSERA_STORE must be host:port, not '", *store, "'");
    return;
  }
  env.store_host = host;
}

}  // namespace

Environment read_environment(std::span<const std::string> variables) {
  Reader reader(variables);
  Environment env;
  read_place(reader, env);
  read_meeting_point(reader, env);
  read_progress(reader, env);
  env.no_color = reader.text("NO_COLOR").has_value();
  env.threads = reader.integer("TESSERA_THREADS", 1, 4096);
  env.python = reader.text("TESSERA_PYTHON");
  env.cuda_connections = reader.integer("CUDA_DEVICE_MAX_CONNECTIONS", 1, 1024);
  env.cache_dir = reader.text("XDG_CACHE_HOME");
  if (const auto home = reader.text("HOME"); home && !env.cache_dir) env.cache_dir = *home + "/.cache";
  if (const auto level = reader.text("TESSERA_LOG_LEVEL")) {
    env.log_level = log_level(*level);
    if (!env.log_level) {
      reader.fault("TESSERA_LOG_LEVEL must be debug, info, warning or error, not '", *level, "'");
    }
  }
  env.warnings = reader.unknown();
  reader.finish();
  return env;
}

Environment read_environment() {
  std::vector<std::string> variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) variables.emplace_back(*entry);
  return read_environment(variables);
}

bool set_thread_waits() {
  if (std::getenv("GOMP_SPINCOUNT") != nullptr || std::getenv("OMP_WAIT_POLICY") != nullptr) return false;
  return ::setenv("GOMP_SPINCOUNT", kSpinCount, 0) == 0;
}

std::optional<std::string> max_cpu_isa() {
  const char* const name = std::getenv("TESSERA_MAX_CPU_ISA");
  return name != nullptr && *name != '\0' ? std::optional<std::string>(name) : std::nullopt;
}

std::span<const EnvironmentVariable> environment_variables() { return kVariables; }

}  // namespace tessera
