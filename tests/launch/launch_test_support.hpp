#pragma once
/// What the launcher's tests share.

#include <gtest/gtest.h>

#include <string>

#include "tessera/base/error.hpp"

namespace tessera {

/// The message of the ErrorType that `call` throws.
template <typename ErrorType, typename Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const ErrorType& error) {
    return error.what();
  }
  return "nothing was refused";
}

template <typename Call>
std::string refusal(Call&& call) {
  return message_of<ConfigError>(call);
}

}  // namespace tessera

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)
