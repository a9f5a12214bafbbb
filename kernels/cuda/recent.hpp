#pragma once
/// A memo that keeps what was used last. Header only and free of CUDA, so that it is tested in every build.

#include <cstddef>
#include <list>
#include <map>
#include <utility>
#include <vector>

namespace tessera::kernels::cuda {

template <typename Key, typename Value>
class Recent {
 public:
  explicit Recent(std::size_t most) : most_(most) {}

  /// The value of `key`, a new one (Value()) if there is none; now the one used last.
  Value& touch(const Key& key) {
    const auto found = places_.find(key);
    if (found != places_.end()) {
      order_.splice(order_.begin(), order_, found->second);
    } else {
      order_.emplace_front(key, Value());
      places_.emplace(key, order_.begin());
    }
    return order_.front().second;
  }

  /// Takes out what was not used for longest, until no more than `most` are left or the others may not go.
  /// The one used last stays.
  template <typename MayGo>
  std::vector<Value> shrink(MayGo may_go) {
    std::vector<Value> gone;
    for (auto entry = order_.end(); order_.size() > most_ && --entry != order_.begin();) {
      if (!may_go(entry->second)) continue;
      gone.push_back(std::move(entry->second));
      places_.erase(entry->first);
      entry = order_.erase(entry);
    }
    return gone;
  }

  std::size_t size() const { return order_.size(); }

 private:
  std::size_t most_;
  std::list<std::pair<Key, Value>> order_;  // the one used last first
  std::map<Key, typename std::list<std::pair<Key, Value>>::iterator> places_;
};

}  // namespace tessera::kernels::cuda
