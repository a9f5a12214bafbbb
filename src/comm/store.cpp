#include "tessera/comm/store.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstring>
#include <mutex>

#include "comm/store_requests.hpp"
#include "comm/store_wire.hpp"
#include "tessera/base/error.hpp"
#include "tessera/comm/timeout.hpp"

namespace tessera {

using namespace store;

namespace {

/// Seconds after a request's own deadline until its answer ("late") must have come.
constexpr double kAnswerSlack = 5;
/// The same for wait_for, whose caller has other things to do.
constexpr double kWatchSlack = 0.5;
/// Seconds for a server to greet and to answer a proof; then the connection is tried again.
constexpr double kGreetingTimeout = 10;
/// A server that drops so many proofs has another secret; fewer may be its way of shedding load.
constexpr int kRefusals = 3;

struct Answer {
  Outcome outcome = Outcome::done;
  std::string text;
};

enum class Ready { yes, late, interrupted };

/// What ends or interrupts a wait before its deadline; both may be null.
struct Watch {
  const Interrupt* interrupt = nullptr;
  const WhileWaiting* while_waiting = nullptr;
};

Ready wait_until_ready(int descriptor, short events, Deadline deadline, const Watch& watch) {
  const bool called = watch.while_waiting != nullptr && *watch.while_waiting;
  std::array<pollfd, 2> waits{{{descriptor, events, 0},
                               {watch.interrupt != nullptr ? watch.interrupt->descriptor() : -1, POLLIN, 0}}};
  for (;;) {
    const Deadline next = called ? std::min(deadline, after(kWhileWaiting)) : deadline;
    const int ready = ::poll(waits.data(), waits.size(), milliseconds_until(next));
    if (ready > 0 && waits[0].revents != 0) return Ready::yes;
    if (ready > 0) return Ready::interrupted;
    if (called) (*watch.while_waiting)();
    if (ready < 0 && errno == EINTR) continue;
    if (Clock::now() >= deadline) return Ready::late;
  }
}

/// Ok, or why not.
enum class Moved { yes, late, interrupted, lost };

Moved send_all(const Socket& socket, std::string_view data, Deadline deadline) {
  while (!data.empty()) {
    if (wait_until_ready(socket.get(), POLLOUT, deadline, {}) == Ready::late) return Moved::late;
    const ssize_t sent = ::send(socket.get(), data.data(), data.size(), MSG_NOSIGNAL);
    if (sent < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (sent <= 0) return Moved::lost;
    data.remove_prefix(static_cast<std::size_t>(sent));
  }
  return Moved::yes;
}

Moved receive_all(const Socket& socket, char* data, std::size_t bytes, Deadline deadline,
                  const Watch& watch = {}) {
  while (bytes > 0) {
    const Ready ready = wait_until_ready(socket.get(), POLLIN, deadline, watch);
    if (ready == Ready::late) return Moved::late;
    if (ready == Ready::interrupted) return Moved::interrupted;
    const ssize_t got = ::recv(socket.get(), data, bytes, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (got <= 0) return Moved::lost;
    data += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return Moved::yes;
}

/// A connection whose ends have proved themselves to each other.
struct Line {
  Socket socket = Socket();
  Seal requests, answers;
};

/// Proves both ends to each other. `refused` is set when the server went away after this side's proof; one
/// that is only slow to answer has not refused.
bool introduce(Line& line, const std::string& secret, Deadline deadline, bool& refused) {
  const Socket& socket = line.socket;
  std::array<char, kGreetingBytes> greeting{};
  const Deadline soon = std::min(deadline, after(kGreetingTimeout));
  if (receive_all(socket, greeting.data(), greeting.size(), soon) != Moved::yes) return false;
  if (std::memcmp(greeting.data(), kMagic.data(), kMagic.size()) != 0) return false;
  Digest server_nonce;
  std::copy_n(greeting.begin() + kMagic.size(), server_nonce.size(), server_nonce.begin());
  const Digest nonce = random_nonce();
  const Digest proof = proof_of(secret, "client", server_nonce, nonce);
  std::string message(nonce.begin(), nonce.end());
  message.append(proof.begin(), proof.end());
  if (send_all(socket, message, soon) != Moved::yes) return false;
  Digest theirs;
  const Moved moved = receive_all(socket, theirs.data(), theirs.size(), soon);
  refused = moved != Moved::late;
  if (moved != Moved::yes) return false;
  line.requests = Seal(secret, "client", server_nonce, nonce);
  line.answers = Seal(secret, "server", server_nonce, nonce);
  return equal_in_constant_time(theirs, proof_of(secret, "server", server_nonce, nonce));
}

}  // namespace

Interrupt::Interrupt() : descriptor_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  TESSERA_ENSURE(IoError, descriptor_ >= 0, "cannot make an eventfd: ", std::strerror(errno));
}

Interrupt::~Interrupt() { ::close(descriptor_); }

void Interrupt::raise() const {
  const std::uint64_t one = 1;
  // A full counter means that it is raised already.
  [[maybe_unused]] const ssize_t written = ::write(descriptor_, &one, sizeof one);
}

bool Interrupt::wait(double timeout_s) const {
  const Ready ready = wait_until_ready(descriptor_, POLLIN, after(timeout_s), {});
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(descriptor_, &count, sizeof count);
  return ready == Ready::yes;
}

struct Store::Impl {
  Impl(std::string address, std::uint16_t port, std::string secret, WhileWaiting while_waiting)
      : address_(std::move(address)),
        port_(port),
        secret_(std::move(secret)),
        while_waiting_(std::move(while_waiting)) {}

  Line connect(Deadline deadline) const {
    std::string reason = "no answer";
    int refusals = 0;
    for (double pause = 0.02;; pause = std::min(pause * 1.5, 0.5)) {
      bool refused = false;
      Line line{connect_to(address_, port_, deadline, reason), {}, {}};
      if (line.socket) {
        if (introduce(line, secret_, deadline, refused)) return line;
        reason = "what answers there is not this job's store";
      }
      refusals += refused ? 1 : 0;
      TESSERA_ENSURE(CommunicationError, refusals < kRefusals, place(),
                     ": it does not know this job's secret (TESSERA_JOB_SECRET must be the same everywhere)");
      TESSERA_ENSURE(CommunicationTimeout, Clock::now() + std::chrono::duration<double>(pause) < deadline,
                     place(), ": cannot be reached in time: ", reason);
      if (while_waiting_) while_waiting_();
      ::poll(nullptr, 0, static_cast<int>(pause * 1000));
    }
  }

  /// One request on a connection of its own for the time of the request, so that threads do not wait for each
  /// other. False when interrupted.
  bool call(const Writer& request, Deadline deadline, Answer& answer, const Interrupt* interrupt = nullptr) {
    Line line = take();
    if (!line.socket) line = connect(deadline);
    Moved moved = send_all(line.socket, line.requests.frame_of(request.body()), deadline);
    std::array<char, 4> head{};
    if (moved != Moved::late)  // a server that has hung up may have said why
      moved = receive_all(line.socket, head.data(), head.size(), deadline, {interrupt, &while_waiting_});
    std::string body;
    if (moved == Moved::yes) {
      const std::size_t length = frame_length(head.data());
      TESSERA_ENSURE(CommunicationError, length <= kLongestFrame, place(), ": an answer of ", length,
                     " bytes");
      body.resize(length + kMacBytes);
      moved = receive_all(line.socket, body.data(), body.size(), deadline);
    }
    if (moved == Moved::interrupted) return false;
    TESSERA_ENSURE(CommunicationTimeout, moved != Moved::late, place(), ": no answer in time");
    TESSERA_ENSURE(CommunicationError, moved != Moved::lost, place(),
                   ": the connection was lost (the process that serves it has ended)");
    const std::string_view all(body), text = all.substr(0, all.size() - kMacBytes);
    TESSERA_ENSURE(CommunicationError, line.answers.fits(text, all.substr(text.size())), place(),
                   ": an answer was changed on its way: its MAC does not fit");
    TESSERA_ENSURE(CommunicationError, parse_answer(text, answer.outcome, answer.text), place(),
                   ": an answer that means nothing");
    if (answer.outcome == Outcome::cut) throw CommunicationError(detail::concat(place(), ": ", answer.text));
    give_back(std::move(line));
    TESSERA_ENSURE(CommunicationError, answer.outcome != Outcome::refused, place(), ": ", answer.text);
    return true;
  }

  Answer call(const Writer& request, double timeout_s) {
    Answer answer;
    call(request, after(timeout_s), answer);
    return answer;
  }

  Line take() {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) return Line();
    Line line = std::move(idle_.back());
    idle_.pop_back();
    return line;
  }

  void give_back(Line line) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(line));
  }

  std::string place() const { return detail::concat("the job's store at ", address_, " port ", port_); }

  static void check(const std::string& text, const char* what) {
    TESSERA_CHECK(text.size() <= kStoreTextLimit, "a ", what, " of ", text.size(),
                  " bytes in the job's store; the limit is ", kStoreTextLimit);
  }

  static std::int64_t milliseconds(double timeout_s) { return milliseconds_until(after(timeout_s)); }

  std::string address_;
  std::uint16_t port_;
  std::string secret_;
  WhileWaiting while_waiting_;
  std::string local_address_;
  std::mutex mutex_;
  std::vector<Line> idle_;
};

Store::Store(const std::string& address, std::uint16_t port, const std::string& secret, double timeout_s,
             WhileWaiting while_waiting)
    : impl_(std::make_unique<Impl>(address, port, secret, std::move(while_waiting))) {
  TESSERA_CHECK(!secret.empty(), "the job's store needs a secret");
  Line line = impl_->connect(after(timeout_s));
  impl_->local_address_ = address_of(line.socket);
  impl_->give_back(std::move(line));
}

Store::~Store() = default;

void Store::set(const std::string& key, const std::string& value, double timeout_s) {
  Impl::check(key, "key");
  Impl::check(value, "value");
  impl_->call(Writer(static_cast<char>(Operation::set)).text(key).text(value), timeout_s);
}

bool Store::wait_for(const std::string& key, std::string& value, double timeout_s,
                     const Interrupt& interrupt) {
  Impl::check(key, "key");
  Answer answer;
  const Writer request =
      Writer(static_cast<char>(Operation::get)).text(key).number(Impl::milliseconds(timeout_s));
  if (!impl_->call(request, after(timeout_s + kWatchSlack), answer, &interrupt)) return false;
  if (answer.outcome != Outcome::done) return false;
  value = std::move(answer.text);
  return true;
}

std::string Store::get(const std::string& key, double timeout_s) {
  Impl::check(key, "key");
  const Answer answer =
      impl_->call(Writer(static_cast<char>(Operation::get)).text(key).number(Impl::milliseconds(timeout_s)),
                  timeout_s + kAnswerSlack);
  TESSERA_ENSURE(CommunicationTimeout, answer.outcome == Outcome::done, impl_->place(), ": nobody has set '",
                 key.substr(0, 200), "' within ", timeout_s, " s");
  return answer.text;
}

bool Store::try_get(const std::string& key, std::string& value, double timeout_s) {
  Impl::check(key, "key");
  Answer answer = impl_->call(Writer(static_cast<char>(Operation::get)).text(key).number(0), timeout_s);
  if (answer.outcome != Outcome::done) return false;
  value = std::move(answer.text);
  return true;
}

std::int64_t Store::add(const std::string& key, std::int64_t amount, double timeout_s) {
  Impl::check(key, "key");
  const Answer answer =
      impl_->call(Writer(static_cast<char>(Operation::add)).text(key).number(amount), timeout_s);
  std::int64_t value = 0;
  const char* end = answer.text.data() + answer.text.size();
  TESSERA_ENSURE(CommunicationError, std::from_chars(answer.text.data(), end, value).ptr == end,
                 impl_->place(), ": a sum that is no number");
  return value;
}

void Store::remove(const std::string& key) {
  Impl::check(key, "key");
  impl_->call(Writer(static_cast<char>(Operation::remove)).text(key), kStoreAnswerTimeout);
}

void Store::barrier(const std::string& name, int rank, int size, double timeout_s) {
  Impl::check(name, "name");
  TESSERA_CHECK(size >= 1 && rank >= 0 && rank < size, "rank ", rank, " of ", size);
  const Writer request = Writer(static_cast<char>(Operation::barrier))
                             .text(name)
                             .number(rank)
                             .number(size)
                             .number(Impl::milliseconds(timeout_s));
  const Answer answer = impl_->call(request, timeout_s + kAnswerSlack);
  TESSERA_ENSURE(CommunicationTimeout, answer.outcome == Outcome::done, "barrier '", name.substr(0, 200),
                 "' of ", size, " ranks: after ", timeout_s, " s these ranks have not come: ", answer.text);
}

const std::string& Store::local_address() const { return impl_->local_address_; }

std::string Store::key_for(const std::string& purpose) const {
  const Digest key = mac_of(impl_->secret_, "key for " + purpose);
  return {key.begin(), key.end()};
}

}  // namespace tessera
