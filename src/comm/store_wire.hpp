#pragma once
/// What travels between a store's server and its clients, and the sockets it travels on.
///
/// A connection begins with: server -> client  magic, 32 random bytes (the server's nonce);
///                           client -> server  32 random bytes (its own nonce), its proof (32 bytes);
///                           server -> client  its proof (32 bytes).
/// Then frames: 4 bytes length of the body (little endian), body, MAC (32 bytes). A request's body is an
/// operation and its fields, an answer's an outcome and one text. The MAC is HMAC-SHA256 of the frame's
/// number on this connection, length and body, under a key of this connection and direction: what was
/// changed, repeated, left out or put in on the way does not fit.

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

constexpr std::string_view kMagic = "TESSERA2";
constexpr std::size_t kGreetingBytes = 8 + 32;
constexpr std::size_t kProofBytes = 32 + 32;
constexpr std::size_t kLongestFrame = 2 * kStoreTextLimit + 64;

/// Random bytes from the system. Errors: IoError.
Digest random_nonce();
/// HMAC-SHA256. Errors: InternalError.
Digest mac_of(std::string_view key, std::string_view message);
/// MAC of what is proved (kMagic, then "client" or "server") and both nonces. Errors: InternalError.
Digest proof_of(std::string_view secret, std::string_view who, const Digest& server_nonce,
                const Digest& client_nonce);
/// In a time that does not depend on where they differ.
bool equal_in_constant_time(const Digest& a, const Digest& b);

constexpr std::size_t kMacBytes = 32;

/// One direction of a connection: makes its frames, or checks them.
class Seal {
 public:
  Seal() = default;
  /// `who` sends: "client" or "server".
  Seal(std::string_view secret, std::string_view who, const Digest& server_nonce, const Digest& client_nonce);
  /// The next frame.
  std::string frame_of(std::string_view body);
  /// Whether body and MAC are those of the next frame; if so it counts as received.
  bool fits(std::string_view body, std::string_view mac);

 private:
  Digest mac(std::string_view body) const;

  Digest key_{};
  std::uint64_t frames_ = 0;
};

enum class Operation : char { set = 1, get = 2, add = 3, remove = 4, barrier = 5 };
/// `cut`: refused, and the connection ends.
enum class Outcome : char { done = 1, late = 2, refused = 3, cut = 4 };

/// Writes a frame's body.
class Writer {
 public:
  explicit Writer(char kind) { body_.push_back(kind); }
  Writer& number(std::int64_t value);
  Writer& text(std::string_view value);
  const std::string& body() const { return body_; }

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
  /// Hands the descriptor over.
  int release() { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_;
};

/// A socket that listens on `address` alone; port 0 takes a free one. Errors: IoError.
Socket listen_on(const std::string& address, std::uint16_t port);
std::uint16_t port_of(const Socket& socket);
/// The local end's address as a number.
std::string address_of(const Socket& socket);
/// Connected, or empty with `reason` filled in. Errors: none.
Socket connect_to(const std::string& address, std::uint16_t port, Deadline deadline, std::string& reason);

}  // namespace tessera::store
