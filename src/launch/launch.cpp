#include "tessera/launch/launch.hpp"

#include <unistd.h>

#include <array>
#include <filesystem>
#include <memory>
#include <optional>

#include "base/host_name.hpp"
#include "launch/host_secret.hpp"
#include "launch/open_secret.hpp"
#include "launch/restarts.hpp"
#include "launch/supervisor.hpp"
#include "tessera/comm/store.hpp"

namespace tessera {
namespace {

using launching::Outcome;

void check(const LaunchOptions& options) {
  TESSERA_CHECK(!options.program.empty() && !options.argv.empty(), "there is no program to start");
  TESSERA_CHECK(options.num_machines >= 1 && options.num_processes >= 1 &&
                    options.num_processes % options.num_machines == 0,
                options.num_processes, " processes on ", options.num_machines, " machines");
  TESSERA_CHECK(options.machine_rank >= 0 && options.machine_rank < options.num_machines, "machine_rank ",
                options.machine_rank, " of ", options.num_machines, " machines");
  TESSERA_CHECK(options.num_machines == 1 || options.main_process_port != 0,
                "several machines need a port in common");
}

/// The secret of all processes of the job.
std::string secret_of(const LaunchOptions& options, const Logger& log) {
  if (!options.secret.empty()) return options.secret;
  if (options.num_machines == 1) return launching::random_secret();
  log.warning(
      "the machines meet at ", options.main_process_ip, ":", options.main_process_port,
      " without a secret: rendezvous and data are open to whoever reaches that port. --secret_file FILE "
      "on every machine (the same file, from openssl rand -hex 32) closes them; "
      "TESSERA_REQUIRE_SECRET=1 refuses to start without");
  return std::string(launching::kOpenSecret);
}

void make_log_dir(const std::string& dir) {
  if (dir.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(dir, error);
  TESSERA_ENSURE(IoError, !error, dir, ": cannot be made: ", error.message());
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

LaunchResult run_attempts(const LaunchOptions& options, const Logger& log,
                          launching::Supervisor& supervisor) {
  if (const auto outcome = supervisor.wait_for_machines()) return {outcome->code, outcome->report};
  launching::Restarts restarts(options);
  for (int attempt = 0;; ++attempt) {
    const Outcome outcome = supervisor.run(attempt);
    supervisor.flush();
    if (outcome.kind != Outcome::Kind::failed || supervisor.interrupted())
      return {outcome.code, outcome.report, supervisor.agreed()};
    const auto delay_s = restarts.next(outcome);
    if (!delay_s) {
      LaunchResult result = restarts.give_up(outcome);
      result.shared = supervisor.agreed();
      return result;
    }
    log.warning(first_line(outcome.report));
    log.warning("everything was ended and starts again in ", *delay_s, " s: restart ", restarts.restarts(),
                " of ", options.max_restarts);
    log.flush();
    if (const auto ended = supervisor.pause(*delay_s)) return {ended->code, ended->report};
  }
}

}  // namespace

LaunchResult launch(const LaunchOptions& options, const Logger& log) {
  check(options);
  make_log_dir(options.log_dir);
  launching::SignalWatch signals;
  // Before any thread is started: the guard is a fork of this process.
  launching::Guard guard(static_cast<std::size_t>(options.num_processes / options.num_machines));
  const std::string secret = secret_of(options, log);
  std::optional<StoreServer> server;
  if (options.machine_rank == 0) {
    StoreServerOptions serving;
    if (!options.secret.empty()) serving.counted_secret = launching::kTurnedAway;
    server.emplace(options.main_process_ip, options.main_process_port, secret, serving);
  }
  const int port = server ? server->port() : options.main_process_port;
  const std::string host = host_name();
  std::optional<launching::Machines> machines;
  if (options.num_machines > 1) machines.emplace(options, secret, host, server ? &*server : nullptr);
  launching::Supervisor supervisor({options, log, host, secret,
                                    detail::concat(options.main_process_ip, ":", port), signals, guard,
                                    machines ? &*machines : nullptr});
  return run_attempts(options, log, supervisor);
}

}  // namespace tessera
