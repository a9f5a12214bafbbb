#pragma once
/// Typed errors and checks that put the values involved into the message. The library throws; it never
/// aborts.

#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace tessera {

/// Root of every error Tessera throws. what() says what happened, where, and what to do.
class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// A caller broke a function's contract: wrong shape, dtype, range.
class InvalidArgument : public Error {
  using Error::Error;
};
/// A configuration (YAML, command line, environment) that cannot be used.
class ConfigError : public Error {
  using Error::Error;
};
/// A data file (.idx/.bin, JSONL, tokenizer) that is missing, damaged or inconsistent.
class DataError : public Error {
  using Error::Error;
};
/// A checkpoint or weight file that is missing, damaged or does not fit the model.
class CheckpointError : public Error {
  using Error::Error;
};
/// The operating system refused an operation on a file, socket or memory.
class IoError : public Error {
  using Error::Error;
};
/// A call of an accelerator's runtime or library that failed. Names the call.
class DeviceError : public Error {
  using Error::Error;
};
/// Other ranks: one was lost, did not come in time, or called something else. Names operation, group and
/// ranks.
class CommunicationError : public Error {
  using Error::Error;
};
/// Training cannot go on: too many non-finite steps in a row.
class TrainingError : public Error {
  using Error::Error;
};
/// A broken invariant inside Tessera: please report it.
class InternalError : public Error {
  using Error::Error;
};

namespace detail {

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  out.precision(9);
  static_cast<void>((out << ... << parts));
  return out.str();
}

template <typename E>
[[noreturn]] void fail(const char* file, int line, const char* condition, const std::string& message) {
  // The code's own expression is for whoever reads the code; it stands in only where nothing else is said.
  std::string text = message.empty() ? concat("[", condition, "]") : message;
  // A programmer's mistake is found by the place in the code; about a file or a configuration that would be
  // noise.
  if constexpr (std::is_base_of_v<InvalidArgument, E> || std::is_base_of_v<InternalError, E>) {
    std::string path(file);
    const auto slash = path.find_last_of('/');
    if (slash != std::string::npos) path.erase(0, slash + 1);
    text += concat(" (", path, ":", line, ")");
  }
  throw E(text);
}

}  // namespace detail
}  // namespace tessera

/// Throws ErrorType with the concatenated parts unless `condition` holds: TESSERA_ENSURE(DataError, n > 0, "n
/// = ", n).
#define TESSERA_ENSURE(ErrorType, condition, ...)                                 \
  do {                                                                            \
    if (!(condition)) [[unlikely]]                                                \
      ::tessera::detail::fail<ErrorType>(__FILE__, __LINE__, #condition,          \
                                         ::tessera::detail::concat(__VA_ARGS__)); \
  } while (false)

/// Throws InvalidArgument unless `condition` holds.
#define TESSERA_CHECK(condition, ...) TESSERA_ENSURE(::tessera::InvalidArgument, condition, __VA_ARGS__)

/// Throws InvalidArgument, with both values in the message, unless the two are equal.
#define TESSERA_CHECK_EQ(a, b, ...)                                                            \
  do {                                                                                         \
    const auto& tessera_a_ = (a);                                                              \
    const auto& tessera_b_ = (b);                                                              \
    if (!(tessera_a_ == tessera_b_)) [[unlikely]]                                              \
      ::tessera::detail::fail<::tessera::InvalidArgument>(                                     \
          __FILE__, __LINE__, #a " == " #b,                                                    \
          ::tessera::detail::concat(tessera_a_, " is not ", tessera_b_, ". ", ##__VA_ARGS__)); \
  } while (false)
