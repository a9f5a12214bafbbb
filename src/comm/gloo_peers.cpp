#include "comm/gloo_peers.hpp"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tessera/base/error.hpp"

namespace tessera {

using namespace store;

namespace {

constexpr std::size_t kRankBytes = 4;
constexpr std::size_t kCallerBytes = kRankBytes + kProofBytes;
constexpr int kAcceptedAtOnce = 16;
constexpr double kLongestPause = 0.5;

std::string text_of(const Digest& digest) { return {digest.begin(), digest.end()}; }

Digest digest_at(const std::string& text, std::size_t at) {
  Digest digest;
  std::copy_n(text.begin() + static_cast<std::ptrdiff_t>(at), digest.size(), digest.begin());
  return digest;
}

/// A new connection has room for so little: what does not fit is a connection that is of no use.
bool say(const Socket& socket, const std::string& bytes) {
  return ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
}

/// Reads no further than `wanted` bytes in all: what follows is Gloo's. False when the connection is lost.
bool listen_to(const Socket& socket, std::string& in, std::size_t wanted) {
  std::string piece(wanted - in.size(), '\0');
  const ssize_t got = ::recv(socket.get(), piece.data(), piece.size(), 0);
  if (got < 0) return errno == EAGAIN || errno == EINTR;
  in.append(piece, 0, static_cast<std::size_t>(got));
  return got > 0;
}

/// Begins to connect; never blocks, as the address is a number. Empty with `trouble` if that cannot be.
Socket begin_to_connect(const std::pair<std::string, std::uint16_t>& place, std::string& trouble) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int code = getaddrinfo(place.first.c_str(), std::to_string(place.second).c_str(), &hints, &found);
  if (code != 0) {
    trouble = gai_strerror(code);
    return Socket();
  }
  Socket socket(::socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, found->ai_protocol));
  const bool begun =
      socket && (::connect(socket.get(), found->ai_addr, found->ai_addrlen) == 0 || errno == EINPROGRESS);
  if (!begun) trouble = std::strerror(errno);
  freeaddrinfo(found);
  return begun ? std::move(socket) : Socket();
}

}  // namespace

Peers::Peers(PeersOptions options) : options_(std::move(options)), listener_(listen_on(options_.address, 0)) {
  connected_.resize(static_cast<std::size_t>(options_.size));
}

Digest Peers::proof(const char* who, int called, int caller, const Digest& called_nonce,
                    const Digest& caller_nonce) const {
  const std::string what =
      detail::concat(who, " of rank ", caller, "'s call to rank ", called, " in job ", options_.job);
  return proof_of(options_.key, what, called_nonce, caller_nonce);
}

std::vector<Socket> Peers::connect(const std::vector<std::pair<std::string, std::uint16_t>>& lower) {
  deadline_ = after(options_.timeout_s);
  for (std::size_t peer = 0; peer < lower.size(); ++peer) {
    Call& call = calls_.emplace_back();
    call.peer = static_cast<int>(peer);
    call.place = lower[peer];
  }
  while (!complete()) {
    if (Clock::now() >= deadline_) give_up();
    turn();
  }
  listener_.close();
  callers_.clear();
  return std::move(connected_);
}

bool Peers::complete() const {
  return std::count_if(connected_.begin(), connected_.end(), [](const Socket& one) { return bool(one); }) ==
         options_.size - 1;
}

/// Waits for something to happen, and does what it asks for.
void Peers::turn() {
  Deadline next = deadline_;
  for (Call& call : calls_) {
    if (call.state == Call::State::pausing && call.next <= Clock::now()) start(call);
    if (call.state == Call::State::pausing) next = std::min(next, call.next);
  }
  const bool accepting = accept_again_ <= Clock::now();
  if (!accepting) next = std::min(next, accept_again_);
  std::vector<pollfd> waits{{accepting ? listener_.get() : -1, POLLIN, 0}};
  for (const Call& call : calls_) {
    const bool connecting = call.state == Call::State::connecting;
    waits.push_back({call.socket.get(), static_cast<short>(connecting ? POLLOUT : POLLIN), 0});
  }
  for (const Caller& caller : callers_) {
    waits.push_back({caller.socket.get(), POLLIN, 0});
    next = std::min(next, caller.until);
  }
  if (::poll(waits.data(), waits.size(), milliseconds_until(next)) < 0) {
    TESSERA_ENSURE(IoError, errno == EINTR, "cannot wait for the other ranks: ", std::strerror(errno));
    return;
  }
  std::size_t place = 1;
  for (Call& call : calls_) {
    const short events = waits[place++].revents;
    if (events != 0) go_on(call, events);
  }
  const Deadline now = Clock::now();
  std::erase_if(calls_,
                [&](const Call& call) { return bool(connected_[static_cast<std::size_t>(call.peer)]); });
  std::erase_if(callers_, [&](Caller& caller) {
    const short events = waits[place++].revents;
    return (events != 0 && !hear(caller)) || caller.until <= now;
  });
  if (waits[0].revents != 0) accept_callers();
}

void Peers::start(Call& call) {
  std::string trouble;
  call.in.clear();
  call.socket = begin_to_connect(call.place, trouble);
  call.state = Call::State::connecting;
  if (!call.socket) again(call, trouble);
}

void Peers::again(Call& call, std::string trouble) {
  call.socket.close();
  call.trouble = std::move(trouble);
  call.state = Call::State::pausing;
  call.next = after(call.pause_s);
  call.pause_s = std::min(call.pause_s * 1.5, kLongestPause);
}

void Peers::go_on(Call& call, short events) {
  if (call.state == Call::State::connecting) {
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(call.socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return again(call, std::strerror(error));
    if ((events & POLLOUT) == 0) return again(call, "the connection was lost");
    call.state = Call::State::greeting;
    return;
  }
  const std::size_t wanted = call.state == Call::State::greeting ? kGreetingBytes : sizeof(Digest);
  if (!listen_to(call.socket, call.in, wanted)) {
    return again(call, call.state == Call::State::greeting ? "the connection was lost"
                                                           : "it does not know this job's secret");
  }
  if (call.in.size() < wanted) return;
  if (call.state == Call::State::greeting) return greet(call);
  if (!equal_in_constant_time(digest_at(call.in, 0),
                              proof("answer", call.peer, options_.rank, call.theirs, call.own))) {
    return again(call, "what answers there is not this job's");
  }
  connected_[static_cast<std::size_t>(call.peer)] = std::move(call.socket);
}

void Peers::greet(Call& call) {
  if (!call.in.starts_with(kMagic)) return again(call, "what answers there is not this job's");
  call.theirs = digest_at(call.in, kMagic.size());
  call.own = random_nonce();
  call.in.clear();
  call.state = Call::State::proving;
  std::string words;
  for (int shift = 0; shift < 32; shift += 8)
    words.push_back(static_cast<char>((static_cast<unsigned>(options_.rank) >> shift) & 0xff));
  words += text_of(call.own) + text_of(proof("proof", call.peer, options_.rank, call.theirs, call.own));
  if (!say(call.socket, words)) again(call, "the connection was lost");
}

void Peers::accept_callers() {
  for (int i = 0; i < kAcceptedAtOnce; ++i) {
    Socket socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) {
      // Out of descriptors: the waiting connection would wake us for ever.
      if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) accept_again_ = after(0.2);
      return;
    }
    if (callers_.size() >= options_.most_unproved + static_cast<std::size_t>(options_.size))
      callers_.erase(callers_.begin());
    Caller caller{std::move(socket), random_nonce(), after(options_.proof_timeout_s), {}};
    if (say(caller.socket, std::string(kMagic) + text_of(caller.nonce)))
      callers_.push_back(std::move(caller));
  }
}

bool Peers::hear(Caller& caller) {
  if (!listen_to(caller.socket, caller.in, kCallerBytes)) return false;
  if (caller.in.size() < kCallerBytes) return true;
  const std::uint32_t rank = frame_length(caller.in.data());
  if (rank <= static_cast<std::uint32_t>(options_.rank) || rank >= static_cast<std::uint32_t>(options_.size))
    return false;
  const Digest nonce = digest_at(caller.in, kRankBytes);
  const auto own = [&](const char* who) {
    return proof(who, options_.rank, static_cast<int>(rank), caller.nonce, nonce);
  };
  if (!equal_in_constant_time(digest_at(caller.in, kRankBytes + nonce.size()), own("proof"))) return false;
  // One that comes twice has lost its first connection.
  if (say(caller.socket, text_of(own("answer")))) connected_[rank] = std::move(caller.socket);
  return false;
}

void Peers::give_up() {
  constexpr int kMostShown = 8;
  std::string missing;
  int count = 0;
  for (int peer = 0; peer < options_.size; ++peer) {
    if (peer == options_.rank || connected_[static_cast<std::size_t>(peer)] || ++count > kMostShown) continue;
    missing += detail::concat(count > 1 ? "; rank " : "rank ", peer);
    const auto call =
        std::find_if(calls_.begin(), calls_.end(), [&](const Call& c) { return c.peer == peer; });
    missing += call == calls_.end() ? std::string(" has not called")
                                    : detail::concat(" at ", call->place.first, " port ", call->place.second,
                                                     ": ", call->trouble);
  }
  if (count > kMostShown) missing += detail::concat("; so ", count - kMostShown, " more");
  calls_.clear();  // who has answered is not left waiting
  callers_.clear();
  throw CommunicationError(detail::concat("rank ", options_.rank, " of ", options_.size, " (", options_.name,
                                          ") could not connect to the others within ", options_.timeout_s,
                                          " s: ", missing));
}

}  // namespace tessera
