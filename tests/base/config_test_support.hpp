#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tessera/base/config_file.hpp"

namespace tessera {

/// What parse_config says about a text; empty if it accepts it.
inline std::string refusal(const std::string& text, const std::vector<std::string>& overrides = {}) {
  try {
    parse_config(text, "t.yaml", overrides);
    return {};
  } catch (const ConfigError& error) {
    return error.what();
  }
}

inline void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "expected: " << part << "\nin:       " << text;
}

}  // namespace tessera
