#pragma once
/// What one rank called, in a form that travels to others, and the comparison of what all ranks called.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/communicator.hpp"

namespace tessera {

/// One rank's call of a collective.
struct CallSignature {
  std::string operation;   ///< "all_reduce", ...
  std::string dtype;       ///< empty: no tensor (barrier, split)
  std::int64_t count = 0;  ///< elements of the tensor, where all ranks must give the same number
  std::string reduction;   ///< "sum", "max"; empty where nothing is reduced
  int root = -1;           ///< -1 where there is none
  std::vector<std::int64_t> send_counts, recv_counts;
  std::string where;  ///< "file.cpp:12"

  /// One line of text.
  std::string encode() const;
  /// Errors: CommunicationError for text that encode() did not write.
  static CallSignature decode(const std::string& text);
  /// "all_gather of 6 float32 (counts 2 4) at file.cpp:12".
  std::string describe() const;
};

/// "file.cpp:12".
std::string place_of(const Communicator::Where& where);

/// Empty if the calls of all ranks (element r: of rank r) belong together. Otherwise a message that names the
/// two calls that do not, with both places, the group's name and the operation's number. `names`: what the
/// message calls each rank (its rank in the world).
std::string find_mismatch(std::span<const CallSignature> calls, std::span<const int> names,
                          const std::string& group, std::uint64_t sequence);

}  // namespace tessera
