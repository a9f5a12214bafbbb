#include "tessera/launch/world.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>

#include "launch/open_secret.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/gloo.hpp"
#include "tessera/comm/store.hpp"

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

std::string secret_of(const Environment& environment, const MeetingPoint& point) {
  if (environment.job_secret) return *environment.job_secret;
  const std::string job = environment.job_id.value_or("without a name");
  if (is_loopback(point.address)) return detail::concat("no secret: job ", job, " of user ", ::getuid());
  TESSERA_ENSURE(ConfigError, !environment.require_secret,
                 "TESSERA_REQUIRE_SECRET is set, and the processes of this job meet at ", point.address,
                 " over the network without a secret: set TESSERA_JOB_SECRET to a random text, the same for "
                 "all (for example: openssl rand -hex 32)");
  return detail::concat(launching::kOpenSecret, ": job ", job);
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

/// The store behind one of the meeting point's ports: that whose server knows the secret.
std::shared_ptr<Store> reach(const MeetingPoint& point, const std::string& secret, double timeout_s) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  for (int i = 0;; i = (i + 1) % point.ports) {
    const double left = std::chrono::duration<double>(deadline - std::chrono::steady_clock::now()).count();
    const double tried_s = point.ports > 1 ? std::min(left, 0.5) : left;
    try {
      return std::make_shared<Store>(point.address, static_cast<std::uint16_t>(point.port + i), secret,
                                     tried_s);
    } catch (const CommunicationError& error) {
      if (point.ports > 1 && left > tried_s) continue;
      throw CommunicationError(detail::concat(
          error.what(), point.from_launcher ? " (the launcher serves it)" : " (rank 0 serves it)"));
    }
  }
}

}  // namespace

std::string warning_of_open_world(const Environment& environment) {
  if (!environment.launched() || environment.world_size == 1 || environment.job_secret) return {};
  const MeetingPoint point = meeting_point(environment);
  if (is_loopback(point.address)) return {};
  return detail::concat("the processes of this job meet at ", point.address, ":", point.port,
                        " without a secret: rendezvous and data are open to whoever reaches that port. "
                        "TESSERA_JOB_SECRET, the same random text for all (openssl rand -hex 32), closes "
                        "them; TESSERA_REQUIRE_SECRET=1 refuses to start without");
}

std::shared_ptr<Communicator> connect_world(const Environment& environment, double timeout_s) {
  const CommOptions options{.timeout_s = timeout_s,
                            .check = environment.check_collectives,
                            .cuda_connections = static_cast<int>(environment.cuda_connections.value_or(0))};
  if (!environment.launched() || environment.world_size == 1) return make_self_communicator("world", options);
  const int rank = static_cast<int>(*environment.rank), size = static_cast<int>(*environment.world_size);
  MeetingPoint point = meeting_point(environment);
  const std::string secret = secret_of(environment, point);
  const auto served = std::make_shared<ServedStore>();
  if (point.served_here) served->server = serve(point, secret);
  served->store = reach(point, secret, timeout_s);
  std::shared_ptr<Store> store(served, served->store.get());
  const bool one_machine = environment.world_size == environment.local_world_size;
  TESSERA_ENSURE(
      ConfigError,
      !point.served_here || one_machine || is_loopback(point.address) || !is_loopback(store->local_address()),
      "on its own machine ", point.address, " is ", store->local_address(),
      ", which other machines cannot reach: set MASTER_ADDR to the number of its address");
  const GlooOptions gloo{.comm = options,
                         .address = environment.comm_address.value_or(""),
                         .job = "world-" + std::to_string(environment.restart)};
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
