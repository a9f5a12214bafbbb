#pragma once
/// What the launcher's tests share.

#include <gtest/gtest.h>

#include <string>

#include "tests/support/errors.hpp"

namespace tessera {

using test::message_of;

template <typename Call>
std::string refusal(Call&& call) {
  return message_of<ConfigError>(call);
}

}  // namespace tessera

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)
