#pragma once
/// The barriers of a store's server: who has come to which.

#include <cstdint>
#include <set>
#include <string>
#include <unordered_map>

namespace tessera::store {

class Barriers {
 public:
  /// Empty if `rank` may wait; otherwise why it may not.
  std::string arrive(const std::string& name, std::int64_t rank, std::int64_t size);
  /// Whether all have come; if so the barrier is forgotten, and its name can be used again.
  bool complete(const std::string& name);
  /// A rank that waited has given up or was lost.
  void leave(const std::string& name, std::int64_t rank);
  /// "0, 3; came and left: 1".
  std::string missing(const std::string& name) const;

 private:
  struct Barrier {
    std::int64_t size = 0;
    std::set<std::int64_t> here, left;
  };
  std::unordered_map<std::string, Barrier> barriers_;
};

}  // namespace tessera::store
