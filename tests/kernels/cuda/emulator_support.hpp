#pragma once
/// What the emulator's tests share.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "device_buffer.hpp"
#include "emulator_kernels.cuh"
#include "tessera/base/error.hpp"

namespace tessera::test {

template <typename T>
std::vector<T> zeros(std::size_t size) {
  return std::vector<T>(size, T(0));
}

/// The message of the error that waiting for the stream gives; empty when there is none.
inline std::string failure(const DeviceStream& stream) {
  try {
    stream.synchronize();
  } catch (const DeviceError& error) {
    return error.what();
  }
  return "";
}

inline void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

}  // namespace tessera::test
