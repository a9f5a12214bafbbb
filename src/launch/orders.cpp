#include "launch/orders.hpp"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "comm/gloo_signals.hpp"
#include "launch/settings_fields.hpp"
#include "launch/words.hpp"
#include "tessera/base/error.hpp"

namespace tessera::launching {
namespace {

// Each entry ends with a zero byte, and an empty one ends them all: values may hold any other byte.
constexpr std::string_view kVariable = "environment.";
constexpr std::string_view kDistributedType = "distributed_type";

std::string text_of(const std::string& value) { return value; }
std::string text_of(bool value) { return value ? "true" : "false"; }
std::string text_of(std::int64_t value) { return std::to_string(value); }
std::string text_of(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

bool read_value(std::string_view text, std::string& value) {
  value = text;
  return true;
}
bool read_value(std::string_view text, bool& value) {
  value = text == "true";
  return value || text == "false";
}
template <typename Number>
bool read_value(std::string_view text, Number& value) {
  return parses(text, value);
}

void add(std::string& orders, std::string_view name, std::string_view value) {
  orders += detail::concat(name, '=', value);
  orders += '\0';
}

bool read_entry(const std::string& entry, LaunchSettings& settings) {
  const auto equals = entry.find('=');
  if (equals == std::string::npos) return false;
  const std::string_view name = std::string_view(entry).substr(0, equals);
  const std::string value = entry.substr(equals + 1);
  if (name.starts_with(kVariable)) {
    settings.environment.push_back(entry.substr(kVariable.size()));
    return true;
  }
  if (name == kDistributedType) {
    settings.distributed_type = value;
    return true;
  }
  bool known = false;
  each_setting([&](const auto& field) {
    if (name == field.name) known = read_value(value, (settings.*field.member).emplace());
  });
  return known;
}

/// The next entry, without its end. Byte by byte: what follows belongs to somebody else.
std::string next_entry(int input) {
  std::string entry;
  while (true) {
    char byte = 0;
    const ssize_t got = read(input, &byte, 1);
    if (got < 0 && errno == EINTR) continue;
    TESSERA_ENSURE(CommunicationError, got == 1, "the launcher that started this one is gone");
    if (byte == '\0') return entry;
    entry += byte;
  }
}

}  // namespace

std::string encode_orders(const LaunchSettings& settings) {
  std::string orders;
  each_setting([&](const auto& field) {
    if (settings.*field.member) add(orders, field.name, text_of(*(settings.*field.member)));
  });
  if (settings.distributed_type) add(orders, kDistributedType, *settings.distributed_type);
  for (const std::string& variable : settings.environment) {
    orders += detail::concat(kVariable, variable);
    orders += '\0';
  }
  return orders + '\0';
}

LaunchSettings read_orders(int input) {
  LaunchSettings settings;
  for (std::string entry = next_entry(input); !entry.empty(); entry = next_entry(input)) {
    TESSERA_ENSURE(CommunicationError, read_entry(entry, settings),
                   "the launcher that started this one says '", entry.substr(0, entry.find('=')),
                   "', which this version does not know: all machines need the same one");
  }
  return settings;
}

OrderedSignals::OrderedSignals(int input) : stop_(eventfd(0, EFD_CLOEXEC)) {
  TESSERA_ENSURE(IoError, stop_ >= 0, "eventfd: ", std::strerror(errno));
  // Signals are for the thread that watches them.
  const SignalsBlocked blocked;
  thread_ = std::thread([this, input] { run(input); });
}

OrderedSignals::~OrderedSignals() {
  const std::uint64_t one = 1;
  while (write(stop_, &one, sizeof one) < 0 && errno == EINTR) continue;
  thread_.join();
  close(stop_);
}

void OrderedSignals::run(int input) {
  while (true) {
    pollfd polled[] = {{stop_, POLLIN, 0}, {input, POLLIN, 0}};
    if (poll(polled, 2, -1) < 0) continue;
    if (polled[0].revents != 0) return;
    unsigned char signal_number = 0;
    const ssize_t got = read(input, &signal_number, 1);
    if (got < 0 && errno == EINTR) continue;
    kill(getpid(), got == 1 ? signal_number : SIGTERM);
    if (got != 1) return;
  }
}

}  // namespace tessera::launching
