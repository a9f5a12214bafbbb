#pragma once
/// What the files of rules between keys share.

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/config_check.hpp"
#include "tessera/base/error.hpp"

namespace tessera {

/// Rules between keys; one is looked at only when all its keys are sound by themselves.
class Rules {
 public:
  Rules(KeySet unsound, std::vector<Finding>& findings) : unsound_(std::move(unsound)), findings_(findings) {}

  /// `find_fault` returns the message, or nothing if the rule holds.
  template <typename F>
  void rule(const std::vector<std::string_view>& keys, F&& find_fault) {
    for (const std::string_view key : keys) {
      if (unsound_.contains(key)) return;
    }
    std::string message = find_fault();
    if (!message.empty()) findings_.push_back({{keys.begin(), keys.end()}, std::move(message)});
  }

 private:
  KeySet unsound_;
  std::vector<Finding>& findings_;
};

template <typename... Parts>
std::string unless(bool holds, const Parts&... parts) {
  return holds ? std::string() : detail::concat(parts...);
}

/// Windows, caps, norms, what a head is for and the stretching of rotary positions (config_attention.cpp).
void check_attention(Rules& rules, const ModelConfig& config);

/// The layout against model and batches (config_layout.cpp); `given`: before anything was filled in.
void check_layout(Rules& rules, const ModelSettings& given, const Config& config);
/// What samples are made of (config_samples.cpp).
void check_samples(Rules& rules, const Config& config);

}  // namespace tessera
