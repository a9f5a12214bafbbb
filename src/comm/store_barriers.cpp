#include "comm/store_barriers.hpp"

#include <vector>

#include "tessera/base/error.hpp"

namespace tessera::store {

namespace {

/// A client can speak of any number of ranks: no more are listed than a person reads.
constexpr std::size_t kMostListed = 1000;

std::string list_of(const std::vector<std::int64_t>& ranks, std::int64_t count) {
  std::string text;
  for (const std::int64_t rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  const std::int64_t left_out = count - static_cast<std::int64_t>(ranks.size());
  return left_out > 0 ? text + detail::concat(" and ", left_out, " more") : text;
}

}  // namespace

std::string Barriers::arrive(const std::string& name, std::int64_t rank, std::int64_t size) {
  Barrier& barrier = barriers_[name];
  if (barrier.size == 0) barrier.size = size;
  const std::string shown = name.substr(0, 200);
  if (barrier.size != size) {
    return detail::concat("barrier '", shown, "' is for ", barrier.size, " ranks; rank ", rank, " came for ",
                          size);
  }
  if (!barrier.here.insert(rank).second) {
    return detail::concat("rank ", rank, " is at barrier '", shown,
                          "' already: two processes have this rank");
  }
  barrier.left.erase(rank);
  return {};
}

bool Barriers::complete(const std::string& name) {
  const auto found = barriers_.find(name);
  if (found == barriers_.end() || static_cast<std::int64_t>(found->second.here.size()) < found->second.size)
    return false;
  barriers_.erase(found);
  return true;
}

void Barriers::leave(const std::string& name, std::int64_t rank) {
  const auto found = barriers_.find(name);
  if (found == barriers_.end()) return;
  found->second.here.erase(rank);
  found->second.left.insert(rank);
  if (found->second.here.empty()) barriers_.erase(found);
}

std::string Barriers::missing(const std::string& name) const {
  const auto found = barriers_.find(name);
  if (found == barriers_.end()) return {};
  const Barrier& barrier = found->second;
  std::vector<std::int64_t> missing, left;
  for (std::int64_t rank = 0; rank < barrier.size && missing.size() < kMostListed; ++rank) {
    if (!barrier.here.contains(rank) && !barrier.left.contains(rank)) missing.push_back(rank);
  }
  const auto here = static_cast<std::int64_t>(barrier.here.size()),
             gone = static_cast<std::int64_t>(barrier.left.size());
  std::string text = list_of(missing, barrier.size - here - gone);
  for (const std::int64_t rank : barrier.left) {
    if (left.size() < kMostListed) left.push_back(rank);
  }
  if (!left.empty())
    text += (text.empty() ? "" : "; ") + std::string("came and left: ") + list_of(left, gone);
  return text;
}

}  // namespace tessera::store
