#pragma once
/// What code keeps and what it needs at most, in bytes from a context's allocator (rounded up to 256 each).

#include <cstddef>
#include <utility>

#include "tessera/device/exec_ctx.hpp"

namespace tessera::test {

/// Bytes that stay in use after `make()`, for as long as what it returns lives.
template <typename Make>
std::size_t held_bytes(const ExecCtx& ctx, Make&& make) {
  const std::size_t before = ctx.allocator->stats().used_bytes;
  const auto kept = make();
  (void)kept;
  return ctx.allocator->stats().used_bytes - before;
}

/// Bytes in use at the highest point of `run()`, over those in use before.
template <typename Run>
std::size_t peak_bytes(const ExecCtx& ctx, Run&& run) {
  const std::size_t before = ctx.allocator->stats().used_bytes;
  ctx.allocator->reset_peak();
  run();
  return ctx.allocator->stats().peak_used_bytes - before;
}

}  // namespace tessera::test
