#pragma once
/// Ranges of single keys and rules between keys, on the structs: the same for files and for programs.

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "tessera/base/config.hpp"

namespace tessera {

/// Keys, to be found by any kind of text.
using KeySet = std::set<std::string, std::less<>>;

/// One broken range or rule and the keys it is about, the likeliest culprit first.
struct Finding {
  std::vector<std::string> keys;
  std::string message;
};

/// All findings. Rules that need a key in `unreadable` are left out: their verdict would mean nothing.
std::vector<Finding> check(const Settings& settings, KeySet unreadable = {});
std::vector<Finding> check(const ModelSettings& settings);

/// Errors: ConfigError, one line per finding, if there is one.
void throw_findings(const std::vector<Finding>& findings);

}  // namespace tessera
