#pragma once
/// The process's environment, read once by the program and handed down. No other file reads it.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/log.hpp"

namespace tessera {

struct Environment {
  /// Set by a launcher, under torchrun's names; where those are absent, what mpirun (Open MPI:
  /// OMPI_COMM_WORLD_*, MPICH and Intel MPI: PMI_*, MPI_LOCAL*) or srun (SLURM_* of a job step) say. Either
  /// none of rank and world_size is there, or both.
  std::optional<std::int64_t> rank;              ///< RANK
  std::optional<std::int64_t> world_size;        ///< WORLD_SIZE
  std::optional<std::int64_t> local_rank;        ///< LOCAL_RANK
  std::optional<std::int64_t> local_world_size;  ///< LOCAL_WORLD_SIZE
  /// MASTER_ADDR; where it is absent, 127.0.0.1 if all processes are on this machine, else the first machine
  /// of SLURM's job step. Absent when none of these says it.
  std::optional<std::string> master_addr;
  std::optional<std::int64_t> master_port;  ///< MASTER_PORT, 0 to 65535
  /// torchrun started this process: what listens at master_port is its own store.
  bool torchrun = false;
  /// What the launcher calls the job: the same in all its processes, another one in other jobs.
  std::optional<std::string> job_id;

  /// TESSERA_STORE, "host:port": a store that the launcher serves.
  std::optional<std::string> store_host;
  std::int64_t store_port = 0;
  std::optional<std::string> job_secret;  ///< TESSERA_JOB_SECRET: whoever has it may join the job
  bool require_secret = false;  ///< TESSERA_REQUIRE_SECRET: no job over the network without a secret
  std::optional<std::string>
      comm_address;                ///< TESSERA_COMM_ADDRESS: under which other ranks reach this process
  bool check_collectives = false;  ///< TESSERA_CHECK_COLLECTIVES
  /// CUDA_DEVICE_MAX_CONNECTIONS: how many hardware queues CUDA makes of a GPU when it begins.
  std::optional<std::int64_t> cuda_connections;
  std::int64_t restart = 0;  ///< TESSERA_RESTART: how often the job was started again before
  /// TESSERA_PROGRESS, "descriptor:inode": the launcher's pipe for how far this process has come.
  int progress_fd = -1;
  std::uint64_t progress_inode = 0;

  bool no_color = false;                ///< NO_COLOR is set and not empty
  std::optional<LogLevel> log_level;    ///< TESSERA_LOG_LEVEL
  std::optional<std::int64_t> threads;  ///< TESSERA_THREADS: CPU threads where device.threads is 0
  std::optional<std::string> python;    ///< TESSERA_PYTHON: the interpreter that runs `-m tessera`

  std::optional<std::string> cache_dir;  ///< of this user: XDG_CACHE_HOME, or HOME/.cache

  /// Variables that begin with TESSERA_ but mean nothing to this version, with the nearest name that does.
  std::vector<std::string> warnings;

  /// Whether a launcher started this process.
  bool launched() const { return rank.has_value(); }
};

/// Reads the environment of this process.
/// Errors: ConfigError, with all faults at once, each naming its variable: malformed or contradicting values.
Environment read_environment();
/// The same from "NAME=value" strings.
Environment read_environment(std::span<const std::string> variables);

/// Makes OpenMP's threads wait as those of a machine that is shared should: they spin for some 50
/// microseconds, then sleep (GOMP_SPINCOUNT), where nobody has set GOMP_SPINCOUNT or OMP_WAIT_POLICY. By
/// default libgomp's spin for whole time slices. libgomp reads the variable before main(), so it holds for
/// programs started from here on. Returns whether it has set it. Not while other threads run.
bool set_thread_waits();

/// TESSERA_MAX_CPU_ISA, where it is set: the widest instruction set the kernels may use, in their words.
std::optional<std::string> max_cpu_isa();

/// One variable that `read_environment` knows.
struct EnvironmentVariable {
  const char* name;
  const char* meaning;
};
std::span<const EnvironmentVariable> environment_variables();

}  // namespace tessera
