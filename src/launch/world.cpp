#include "tessera/launch/world.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>

#include "launch/host_secret.hpp"
#include "launch/open_secret.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/gloo.hpp"
#include "tessera/comm/store.hpp"
#include "tessera/comm/timeout.hpp"

namespace tessera {

namespace {

struct MeetingPoint {
  std::string address;
  std::uint16_t port = 0;
  bool served_here = false, from_launcher = false;
  int ports = 1;  ///< so many from `port` on: the first free one is taken
};

/// The store as one rank uses it, with the server where that is in this process: both end together.
struct ServedStore {
  std::unique_ptr<StoreServer> server;
  std::shared_ptr<Store> store;
};

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" || address.starts_with("127.");
}

std::uint64_t hash_of(const std::string& text) {  // FNV-1a
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

std::uint16_t port_of(const Environment& environment) {
  if (environment.master_port)
    return static_cast<std::uint16_t>(*environment.master_port + (environment.torchrun ? 1 : 0));
  constexpr std::uint64_t kFirst = 20000, kCount = 12000;  // below the ports the system gives out
  return static_cast<std::uint16_t>(kFirst + hash_of(environment.job_id.value_or("")) % kCount);
}

MeetingPoint meeting_point(const Environment& environment) {
  if (environment.store_host)
    return {*environment.store_host, static_cast<std::uint16_t>(environment.store_port), false, true};
  TESSERA_ENSURE(
      ConfigError, environment.master_addr.has_value(), "this is rank ", *environment.rank, " of ",
      *environment.world_size,
      ", but nobody says where the processes meet: set MASTER_ADDR to the machine of rank 0 (and MASTER_PORT "
      "to a free port there), the same for all");
  const std::uint16_t port = port_of(environment);
  TESSERA_ENSURE(ConfigError, port != 0, "MASTER_PORT must be a port that is free on ",
                 *environment.master_addr, ", not 0");
  // torchrun hands out a port that is its own, and no other: something else may have taken the one after it.
  constexpr int kTriedUnderTorchrun = 8;
  return {.address = *environment.master_addr,
          .port = port,
          .served_here = environment.rank == 0,
          .ports = environment.torchrun ? kTriedUnderTorchrun : 1};
}

bool on_one_machine(const Environment& environment, const MeetingPoint& point) {
  return is_loopback(point.address) || environment.world_size == environment.local_world_size;
}

/// By what this process knows the others.
struct Secret {
  std::string text;  ///< empty where it is in a file
  std::string path;  ///< of that file (host_secret.hpp)
  /// As it is now; empty if the file is not there yet.
  std::string now() const { return path.empty() ? text : launching::read_host_secret(path); }
};

Secret secret_of(const Environment& environment, const MeetingPoint& point) {
  if (environment.job_secret) return {*environment.job_secret, {}};
  TESSERA_ENSURE(ConfigError, !point.from_launcher,
                 "TESSERA_STORE says where this job's store is, and nobody says its secret: set "
                 "TESSERA_JOB_SECRET to the one of that store");
  const std::string job = environment.job_id.value_or("without a name");
  if (on_one_machine(environment, point))
    return {{}, launching::host_secret_path(detail::concat("job-", hash_of(job), "-", point.port))};
  TESSERA_ENSURE(ConfigError, !environment.require_secret,
                 "TESSERA_REQUIRE_SECRET is set, and the processes of this job meet at ", point.address,
                 " over the network without a secret: set TESSERA_JOB_SECRET to a random text, the same for "
                 "all (for example: openssl rand -hex 32)");
  return {detail::concat(launching::kOpenSecret, ": job ", job), {}};
}

/// Listens on the first free port of the meeting point, which from then on has only that one.
std::unique_ptr<StoreServer> serve(MeetingPoint& point, const std::string& secret) {
  for (;; ++point.port, --point.ports) {
    try {
      auto server = std::make_unique<StoreServer>(point.address, point.port, secret);
      point.ports = 1;
      return server;
    } catch (const IoError&) {
      if (point.ports <= 1) throw;
    }
  }
}

/// The store behind one of the meeting point's ports: that whose server knows the secret. A file may still be
/// that of an earlier job, so it is read again each time.
std::shared_ptr<Store> reach(const MeetingPoint& point, const Secret& secret, double timeout_s,
                             const WhileWaiting& while_waiting) {
  using Clock = std::chrono::steady_clock;
  constexpr double kFirstTry = 0.5;
  constexpr auto kPause = std::chrono::milliseconds(20);
  const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s);
  const bool several = point.ports > 1 || !secret.path.empty();
  double longest = kFirstTry;
  for (int port = 0;;) {
    try {
      const std::string text = secret.now();
      const double left = std::chrono::duration<double>(deadline - Clock::now()).count();
      TESSERA_ENSURE(CommunicationTimeout, !text.empty(), "nobody has left the job's secret in ", secret.path,
                     " within ", timeout_s, " s");
      const double tried_s = several ? std::min(left, longest) : left;
      const auto number = static_cast<std::uint16_t>(point.port + port);
      port = (port + 1) % point.ports;
      if (port == 0) longest *= 2;  // a machine may be that slow
      return std::make_shared<Store>(point.address, number, text, tried_s, while_waiting);
    } catch (const CommunicationError& error) {
      if (several && Clock::now() + kPause < deadline) {
        if (while_waiting) while_waiting();
        std::this_thread::sleep_for(kPause);
        continue;
      }
      const std::string text = detail::concat(
          error.what(), point.from_launcher ? " (the launcher serves it)" : " (rank 0 serves it)");
      if (dynamic_cast<const CommunicationTimeout*>(&error) != nullptr) throw CommunicationTimeout(text);
      throw CommunicationError(text);
    }
  }
}

}  // namespace

std::string warning_of_open_world(const Environment& environment) {
  if (!environment.launched() || environment.world_size == 1 || environment.job_secret) return {};
  const MeetingPoint point = meeting_point(environment);
  if (on_one_machine(environment, point)) return {};
  return detail::concat("the processes of this job meet at ", point.address, ":", point.port,
                        " without a secret: rendezvous and data are open to whoever reaches that port. "
                        "TESSERA_JOB_SECRET, the same random text for all (openssl rand -hex 32), closes "
                        "them; TESSERA_REQUIRE_SECRET=1 refuses to start without");
}

std::shared_ptr<Communicator> connect_world(const Environment& environment, double timeout_s,
                                            const WhileWaiting& while_waiting) {
  const CommOptions options{.timeout_s = timeout_s,
                            .check = environment.check_collectives,
                            .cuda_connections = static_cast<int>(environment.cuda_connections.value_or(0))};
  if (!environment.launched() || environment.world_size == 1) return make_self_communicator("world", options);
  const int rank = static_cast<int>(*environment.rank), size = static_cast<int>(*environment.world_size);
  MeetingPoint point = meeting_point(environment);
  Secret secret = secret_of(environment, point);
  std::optional<launching::HostSecret> made;  // until all have come
  if (point.served_here && !secret.path.empty()) {
    made.emplace(secret.path);
    secret = {made->text(), {}};
  }
  const auto served = std::make_shared<ServedStore>();
  if (point.served_here) served->server = serve(point, secret.text);
  if (made) made->publish();
  served->store = reach(point, secret, timeout_s, while_waiting);
  std::shared_ptr<Store> store(served, served->store.get());
  const bool one_machine = environment.world_size == environment.local_world_size;
  TESSERA_ENSURE(
      ConfigError,
      !point.served_here || one_machine || is_loopback(point.address) || !is_loopback(store->local_address()),
      "on its own machine ", point.address, " is ", store->local_address(),
      ", which other machines cannot reach: set MASTER_ADDR to the number of its address");
  const GlooOptions gloo{.comm = options,
                         .address = environment.comm_address.value_or(""),
                         .job = "world-" + std::to_string(environment.restart),
                         .while_waiting = while_waiting};
  return make_gloo_communicator(std::move(store), rank, size, gloo);
}

void tell_others(Communicator& world, const std::exception& error) noexcept {
  if (dynamic_cast<const CommunicationError*>(&error) != nullptr) return;
  try {
    world.abort(detail::concat("rank ", world.rank(), " failed: ", error.what()));
  } catch (const std::exception&) {
    // Out of memory: the others notice that the connection is gone.
  }
}

}  // namespace tessera
