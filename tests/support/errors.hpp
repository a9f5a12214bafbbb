#pragma once
/// What tests ask of an error and its words.

#include <gtest/gtest.h>

#include <string>

#include "tessera/base/error.hpp"

namespace tessera::test {

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// That `fn` throws an InvalidArgument with `part` in its words.
template <typename Fn>
void expect_refusal(Fn&& fn, const std::string& part) {
  try {
    fn();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const InvalidArgument& error) {
    EXPECT_TRUE(contains(error.what(), part)) << error.what();
  }
}

}  // namespace tessera::test
