#pragma once
/// What the files of rules between keys share.

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/config_check.hpp"
#include "tessera/base/error.hpp"

namespace tessera {

/// Rules between keys; one is looked at only when all its keys are sound by themselves.
class Rules {
 public:
  Rules(std::set<std::string> unsound, std::vector<Finding>& findings)
      : unsound_(std::move(unsound)), findings_(findings) {}

  /// `find_fault` returns the message, or nothing if the rule holds.
  template <typename F>
  void rule(std::vector<std::string> keys, F&& find_fault) {
    for (const std::string& key : keys) {
      if (unsound_.contains(key)) return;
    }
    std::string message = find_fault();
    if (!message.empty()) findings_.push_back({std::move(keys), std::move(message)});
  }

 private:
  std::set<std::string> unsound_;
  std::vector<Finding>& findings_;
};

template <typename... Parts>
std::string unless(bool holds, const Parts&... parts) {
  return holds ? std::string() : detail::concat(parts...);
}

/// The layout against model and batches (config_layout.cpp).
void check_layout(Rules& rules, const Config& config);

}  // namespace tessera
