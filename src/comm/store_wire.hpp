#pragma once
/// What travels between a store's server and its clients, and the sockets it travels on.
///
/// A connection begins with: server -> client  magic, 32 random bytes (the server's nonce);
///                           client -> server  32 random bytes (its own nonce), its proof (32 bytes);
///                           server -> client  its proof (32 bytes).
/// Then frames: 4 bytes length (little endian), body. A request's body is an operation and its fields, an
/// answer's an outcome and one text.

#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/comm/store.hpp"

namespace tessera::store {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;
using Digest = std::array<char, 32>;

/// Now plus `seconds`, kept within what a clock can hold.
Deadline after(double seconds);
/// Milliseconds until `deadline` for poll(), rounded up; 0 when it has passed.
int milliseconds_until(Deadline deadline);

constexpr std::string_view kMagic = "TESSERA1";
constexpr std::size_t kGreetingBytes = 8 + 32;
constexpr std::size_t kProofBytes = 32 + 32;
constexpr std::size_t kLongestFrame = 2 * kStoreTextLimit + 64;

/// Random bytes from the system. Errors: IoError.
Digest random_nonce();
/// HMAC-SHA256 of who proves (kMagic, "client" or "server") and both nonces. Errors: InternalError.
Digest proof_of(const std::string& secret, std::string_view who, const Digest& server_nonce,
                const Digest& client_nonce);
/// In a time that does not depend on where they differ.
bool equal_in_constant_time(const Digest& a, const Digest& b);

enum class Operation : char { set = 1, get = 2, add = 3, remove = 4, barrier = 5 };
enum class Outcome : char { done = 1, late = 2, refused = 3 };

/// Writes a frame.
class Writer {
 public:
  explicit Writer(char kind) { body_.push_back(kind); }
  Writer& number(std::int64_t value);
  Writer& text(std::string_view value);
  /// With its length in front.
  std::string frame() const;

 private:
  std::string body_;
};

/// Reads a frame's body; every read is checked against what is left.
class Reader {
 public:
  explicit Reader(std::string_view body) : rest_(body) {}
  bool kind(char& value);
  bool number(std::int64_t& value);
  bool text(std::string& value);
  bool finished() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

std::uint32_t frame_length(const char* four_bytes);

/// A file descriptor that closes itself.
class Socket {
 public:
  explicit Socket(int descriptor = -1) : descriptor_(descriptor) {}
  ~Socket() { close(); }
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept;
  int get() const { return descriptor_; }
  explicit operator bool() const { return descriptor_ >= 0; }
  void close();

 private:
  int descriptor_;
};

/// A socket that listens on `address` alone. Errors: IoError.
Socket listen_on(const std::string& address, std::uint16_t port);
std::uint16_t port_of(const Socket& socket);
/// The local end's address as a number.
std::string address_of(const Socket& socket);
/// Connected, or empty with `reason` filled in. Errors: none.
Socket connect_to(const std::string& address, std::uint16_t port, Deadline deadline, std::string& reason);

}  // namespace tessera::store
