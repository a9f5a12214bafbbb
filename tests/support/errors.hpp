#pragma once
/// What tests ask of an error and its words.

#include <gtest/gtest.h>

#include <string>

#include "tessera/base/error.hpp"

namespace tessera::test {

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// The message of the E that `fn` throws; others pass.
template <typename E, typename Fn>
std::string message_of(Fn&& fn) {
  try {
    fn();
  } catch (const E& error) {
    return error.what();
  }
  return "nothing was thrown";
}

/// That `fn` throws an E whose message holds all of `parts`.
template <typename E, typename Fn, typename... Parts>
void expect_error(Fn&& fn, const Parts&... parts) {
  try {
    fn();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const E& error) {
    for (const std::string& part : {std::string(parts)...})
      EXPECT_TRUE(contains(error.what(), part)) << "'" << part << "' is not in: " << error.what();
  }
}

/// That `fn` throws an InvalidArgument with `part` in its words.
template <typename Fn>
void expect_refusal(Fn&& fn, const std::string& part) {
  expect_error<InvalidArgument>(fn, part);
}

}  // namespace tessera::test
