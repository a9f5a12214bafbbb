#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <map>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "comm/store_barriers.hpp"
#include "comm/store_requests.hpp"
#include "comm/store_wire.hpp"
#include "tessera/base/error.hpp"

namespace tessera {

namespace {

using namespace store;

constexpr std::size_t kReadAtOnce = 64 * 1024;

/// What a client waits for: a key, or its place in a barrier.
struct Parked {
  std::string name;
  std::optional<std::int64_t> barrier_rank;
  Deadline deadline;
};

struct Client {
  Socket socket;
  Digest nonce;
  bool proved = false;
  Deadline prove_until;
  Seal requests, answers;
  std::string in, out;
  bool last_answer = false;  ///< the connection ends when `out` is sent
  std::optional<Parked> parked;

  void answer(Outcome outcome, std::string_view text = {}) {
    out = answers.frame_of(Writer(static_cast<char>(outcome)).text(text).body());
  }
};

}  // namespace

struct StoreServer::Impl {
  Impl(const std::string& address, std::uint16_t port, std::string secret, const StoreServerOptions& options)
      : secret_(std::move(secret)), options_(options), listener_(listen_on(address, port)) {
    port_ = port_of(listener_);
    thread_ = std::thread([this] {
      try {
        serve();
      } catch (const std::exception&) {
        // Out of memory or of random bytes. Clients learn it by their connections' end.
      }
      clients_.clear();
      listener_.close();
    });
  }
  ~Impl() {
    stop_.raise();
    thread_.join();
  }
  std::uint16_t port() const { return port_; }
  int turned_away() const { return turned_away_; }

 private:
  void serve() {
    for (;;) {
      std::vector<pollfd> waits{{stop_.descriptor(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
      Deadline next = after(3600);
      if (accept_again_ > Clock::now()) {
        waits[1].events = 0;
        next = accept_again_;
      }
      for (const auto& [id, client] : clients_) {
        waits.push_back({client.socket.get(), interest_in(client), 0});
        if (!client.proved) next = std::min(next, client.prove_until);
        if (client.parked) next = std::min(next, client.parked->deadline);
      }
      const int ready = ::poll(waits.data(), waits.size(), milliseconds_until(next));
      if (ready < 0 && errno != EINTR) return;
      if (waits[0].revents != 0) return;
      if (ready > 0) serve_clients(waits);
      expire();
      if (ready > 0 && waits[1].revents != 0) accept_client();
    }
  }

  /// Nothing more is read from a client whose last request has no answer yet.
  static short interest_in(const Client& client) {
    if (!client.out.empty()) return POLLOUT;
    return client.parked ? POLLRDHUP : POLLIN;
  }

  void serve_clients(const std::vector<pollfd>& waits) {
    std::size_t place = 2;
    std::vector<std::uint64_t> gone;
    for (auto& [id, client] : clients_) {
      const short events = waits[place++].revents;
      if (events == 0) continue;
      const bool lost = (events & (POLLERR | POLLHUP | POLLNVAL)) != 0 ||
                        (client.parked.has_value() && (events & POLLRDHUP) != 0);
      if (lost || !((events & POLLOUT) != 0 ? flush(client) : read_from(id, client))) gone.push_back(id);
    }
    for (const std::uint64_t id : gone) drop(id);
  }

  void accept_client() {
    Socket socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) {
      // Out of descriptors: the waiting connection would wake us for ever.
      if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) accept_again_ = after(0.2);
      return;
    }
    std::vector<std::uint64_t> unproved;
    for (const auto& [id, client] : clients_) {
      if (!client.proved) unproved.push_back(id);
    }
    if (static_cast<int>(unproved.size()) >= options_.most_unproved) drop(unproved.front());
    Client& client = clients_[next_id_++];
    client.socket = std::move(socket);
    client.nonce = random_nonce();
    client.prove_until = after(options_.proof_timeout_s);
    client.out.assign(kMagic);
    client.out.append(client.nonce.begin(), client.nonce.end());
    flush(client);
  }

  /// False when the connection is lost.
  static bool flush(Client& client) {
    while (!client.out.empty()) {
      const ssize_t sent = ::send(client.socket.get(), client.out.data(), client.out.size(), MSG_NOSIGNAL);
      if (sent < 0) return errno == EAGAIN || errno == EINTR;
      client.out.erase(0, static_cast<std::size_t>(sent));
    }
    return !client.last_answer;
  }

  /// Reads no further than the end of what the client may say next.
  bool read_from(std::uint64_t id, Client& client) {
    const std::size_t wanted = client.proved ? wanted_of_frame(client.in) : kProofBytes;
    std::string piece(std::min(wanted - client.in.size(), kReadAtOnce), '\0');
    const ssize_t got = ::recv(client.socket.get(), piece.data(), piece.size(), 0);
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    if (got == 0) return false;
    client.in.append(piece, 0, static_cast<std::size_t>(got));
    if (!client.proved) return client.in.size() < kProofBytes || check_proof(client);
    if (client.in.size() < 4) return true;
    const std::size_t length = frame_length(client.in.data());
    const bool too_long = length > kLongestFrame;
    if (!too_long && client.in.size() < 4 + length + kMacBytes) return true;
    const std::string body = too_long ? std::string() : client.in.substr(4, length);
    if (too_long || !client.requests.fits(body, std::string_view(client.in).substr(4 + length))) {
      // The client is told, as its answers still fit; nothing more is read from this connection.
      client.last_answer = true;
      client.answer(Outcome::cut, "a request was changed on its way: its MAC does not fit");
      return flush(client);
    }
    client.in.clear();
    return handle(id, client, body) && flush(client);
  }

  static std::size_t wanted_of_frame(const std::string& in) {
    return in.size() < 4 ? 4 : 4 + std::size_t{frame_length(in.data())} + kMacBytes;
  }

  bool check_proof(Client& client) {
    Digest nonce, proof;
    std::copy_n(client.in.begin(), nonce.size(), nonce.begin());
    std::copy_n(client.in.begin() + nonce.size(), proof.size(), proof.begin());
    client.in.clear();
    const auto knows = [&](const std::string& secret) {
      return equal_in_constant_time(proof, proof_of(secret, "client", client.nonce, nonce));
    };
    if (!knows(secret_)) {
      if (!options_.counted_secret.empty() && knows(options_.counted_secret)) ++turned_away_;
      return false;
    }
    client.proved = true;
    client.requests = Seal(secret_, "client", client.nonce, nonce);
    client.answers = Seal(secret_, "server", client.nonce, nonce);
    const Digest own = proof_of(secret_, "server", client.nonce, nonce);
    client.out.assign(own.begin(), own.end());
    return flush(client);
  }

  /// False for what no client of ours sends.
  bool handle(std::uint64_t id, Client& client, const std::string& body) {
    Request request;
    if (!parse_request(body, request)) return false;
    switch (request.operation) {
      case Operation::set:
        set(request.key, std::move(request.value));
        client.answer(Outcome::done);
        return true;
      case Operation::get: {
        const auto found = values_.find(request.key);
        if (found != values_.end()) {
          client.answer(Outcome::done, found->second);
        } else if (request.timeout_ms <= 0) {
          client.answer(Outcome::late);
        } else {
          client.parked = Parked{request.key, {}, after(static_cast<double>(request.timeout_ms) / 1000)};
        }
        return true;
      }
      case Operation::add:
        add(client, request.key, request.amount);
        return true;
      case Operation::remove:
        values_.erase(request.key);
        client.answer(Outcome::done);
        return true;
      case Operation::barrier:
        arrive(id, client, request.key, {request.rank, request.size, request.timeout_ms});
        return true;
    }
    return false;
  }

  void set(const std::string& key, std::string value) {
    for (auto& [id, client] : clients_) {
      if (!client.parked || client.parked->barrier_rank || client.parked->name != key) continue;
      client.parked.reset();
      client.answer(Outcome::done, value);
      flush(client);
    }
    values_[key] = std::move(value);
  }

  void add(Client& client, const std::string& key, std::int64_t amount) {
    std::int64_t value = 0;
    if (const auto found = values_.find(key); found != values_.end()) {
      const std::string& text = found->second;
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
      if (error != std::errc() || end != text.data() + text.size())
        return client.answer(Outcome::refused, "key '" + key.substr(0, 200) + "' does not hold a number");
    }
    const std::string sum = std::to_string(
        static_cast<std::int64_t>(static_cast<std::uint64_t>(value) + static_cast<std::uint64_t>(amount)));
    set(key, sum);
    client.answer(Outcome::done, sum);
  }

  struct Arrival {
    std::int64_t rank, size, timeout_ms;
  };

  void arrive(std::uint64_t id, Client& client, const std::string& name, const Arrival& arrival) {
    const std::string refusal = barriers_.arrive(name, arrival.rank, arrival.size);
    if (!refusal.empty()) {
      client.answer(Outcome::refused, refusal);
      return;
    }
    client.parked = Parked{name, arrival.rank, after(static_cast<double>(arrival.timeout_ms) / 1000)};
    if (!barriers_.complete(name)) return;
    for (auto& [other, waiting] : clients_) {
      if (!waiting.parked || !waiting.parked->barrier_rank || waiting.parked->name != name) continue;
      waiting.parked.reset();
      waiting.answer(Outcome::done);
      if (other != id) flush(waiting);  // the caller flushes this one
    }
  }

  void leave_barrier(const Parked& parked) {
    if (parked.barrier_rank) barriers_.leave(parked.name, *parked.barrier_rank);
  }

  void expire() {
    const Deadline now = Clock::now();
    std::vector<std::uint64_t> gone;
    for (auto& [id, client] : clients_) {
      if (!client.proved && client.prove_until <= now) gone.push_back(id);
      if (!client.parked || client.parked->deadline > now) continue;
      const Parked parked = *client.parked;
      client.parked.reset();
      client.answer(Outcome::late, parked.barrier_rank ? barriers_.missing(parked.name) : std::string());
      leave_barrier(parked);
      flush(client);
    }
    for (const std::uint64_t id : gone) drop(id);
  }

  void drop(std::uint64_t id) {
    const auto found = clients_.find(id);
    if (found == clients_.end()) return;
    if (found->second.parked) leave_barrier(*found->second.parked);
    clients_.erase(found);
  }

  std::string secret_;
  StoreServerOptions options_;
  Socket listener_;
  std::uint16_t port_ = 0;
  std::atomic<int> turned_away_ = 0;
  Deadline accept_again_{};
  Interrupt stop_;
  std::map<std::uint64_t, Client> clients_;  // by age
  std::uint64_t next_id_ = 0;
  std::unordered_map<std::string, std::string> values_;
  Barriers barriers_;
  std::thread thread_;
};

StoreServer::StoreServer(const std::string& address, std::uint16_t port, const std::string& secret,
                         const StoreServerOptions& options) {
  TESSERA_CHECK(!address.empty(), "the job's store needs an address to listen on");
  TESSERA_CHECK(!secret.empty(), "the job's store needs a secret");
  impl_ = std::make_unique<Impl>(address, port, secret, options);
}

StoreServer::~StoreServer() = default;

std::uint16_t StoreServer::port() const { return impl_->port(); }

int StoreServer::turned_away() const { return impl_->turned_away(); }

}  // namespace tessera
