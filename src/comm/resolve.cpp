#include "comm/resolve.hpp"

#include <sys/socket.h>

#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "comm/gloo_signals.hpp"
#include "tessera/base/error.hpp"

namespace tessera::store {

namespace {

/// What the thread that asks leaves; it may come when nobody wants it any more.
struct Question {
  std::string address, port;
  std::mutex mutex;
  std::condition_variable changed;
  bool answered = false;
  int code = 0;
  Addresses list;
};

addrinfo tcp(int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  return hints;
}

void ask(Question& question, Lookup lookup) {
  const addrinfo hints = tcp(0);
  addrinfo* list = nullptr;
  const int code = lookup(question.address.c_str(), question.port.c_str(), &hints, &list);
  const std::lock_guard lock(question.mutex);
  question.code = code;
  question.list.reset(code == 0 ? list : nullptr);
  question.answered = true;
  question.changed.notify_all();
}

}  // namespace

Addresses resolve(const std::string& address, const std::string& port, Deadline deadline, std::string& reason,
                  Lookup lookup) {
  const addrinfo numeric = tcp(AI_NUMERICHOST);
  addrinfo* list = nullptr;
  if (::getaddrinfo(address.c_str(), port.c_str(), &numeric, &list) == 0) return Addresses(list);
  const auto question = std::make_shared<Question>();
  question->address = address;
  question->port = port;
  try {
    const SignalsBlocked signals;
    std::thread([question, lookup] { ask(*question, lookup); }).detach();
  } catch (const std::system_error& error) {
    throw IoError(detail::concat("cannot start a thread to look up ", address, ": ", error.what()));
  }
  std::unique_lock lock(question->mutex);
  if (!question->changed.wait_until(lock, deadline, [&] { return question->answered; })) {
    reason = "the name '" + address + "' was not resolved in time (does the name server answer?)";
    return nullptr;
  }
  if (question->code != 0) reason = gai_strerror(question->code);
  return std::move(question->list);
}

}  // namespace tessera::store
