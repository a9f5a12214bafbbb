#pragma once
#include <cstdint>
#include <memory>

#include "tessera/device/allocator.hpp"
#include "tessera/device/stream.hpp"

namespace tessera {

/// Where work runs, where its memory comes from, what its random numbers are keyed by. Passed to everything
/// that computes; nothing is fetched from ambient state.
struct ExecCtx {
  std::shared_ptr<Stream> stream;
  std::shared_ptr<CachingAllocator> allocator;
  std::uint64_t seed = 0;

  /// A context on the CPU. threads = 0 takes every core this process may run on.
  static ExecCtx cpu(int threads = 0, std::uint64_t seed = 0);
  Device device() const { return stream->device(); }
};

}  // namespace tessera
