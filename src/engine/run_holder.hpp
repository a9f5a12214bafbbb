#pragma once
/// What run.lock says: who holds the lease of a folder.

#include <cstdint>
#include <optional>
#include <string>

namespace tessera {

struct RunHolder {
  std::string host, boot, processes;  ///< processes: the namespace in which `pid` is a process
  std::int64_t pid = 0;
  std::uint64_t started = 0;  ///< of the process, in clock ticks since boot
  std::string since, token;
  std::int64_t generation = 0;
  bool released = false;  ///< it has ended and given the lease back

  /// This process, with a new token. Errors: IoError.
  static RunHolder self();
  /// Nothing if `text` is not whole: its writer is at it, or was killed.
  static std::optional<RunHolder> parse(const std::string& text);
  /// With spaces at the end that make it at least so long, so that it covers what it is written over.
  std::string text(std::int64_t count, std::size_t least_bytes = 0) const;

  /// Whether /proc of this process shows it.
  bool is_within_sight() const;
  bool lives() const;
};

}  // namespace tessera
