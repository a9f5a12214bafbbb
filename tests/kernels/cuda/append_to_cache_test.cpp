/// What a pass adds to the cache, on CUDA.

#include <gtest/gtest.h>

#include "tests/kernels/cache_problem.hpp"
#include "tests/kernels/cuda/device_buffer.hpp"

namespace tessera::kernels {
namespace {

using cache_test::Problem;
using test::DeviceBuffer;

template <typename T>
std::vector<T> narrowed(const std::vector<std::uint32_t>& wide) {
  return {wide.begin(), wide.end()};
}

/// Elements of 4 and of 2 bytes; rows that begin at multiples of 16 bytes, and others.
template <typename T>
void check(const cache_test::Case& c, std::size_t offset) {
  SKIP_WITHOUT_CUDA();
  const test::DeviceStream stream;
  Problem problem(c);
  const DeviceBuffer<T> key(stream, narrowed<T>(problem.key), offset),
      value(stream, narrowed<T>(problem.value), offset);
  const DeviceBuffer<T> kept_key(stream, narrowed<T>(problem.kept_key)),
      kept_value(stream, narrowed<T>(problem.kept_value));
  const DeviceBuffer<std::int32_t> pages(stream, problem.pages), begin(stream, problem.begin),
      length(stream, c.length);
  AppendToCache params = problem.params();
  params.dtype = sizeof(T) == 4 ? DType::f32 : DType::bf16;
  params.key = key.data(), params.value = value.data();
  params.kept_key = kept_key.data(), params.kept_value = kept_value.data();
  params.pages = pages.data();
  if (params.length != nullptr) params.length = length.data();
  if (params.begin != nullptr) params.begin = begin.data();
  cuda::append_to_cache(params, stream.launch());
  if constexpr (sizeof(T) == 4) {
    problem.expect_kept(kept_key.host(), kept_value.host(), begin.host());
  } else {
    cpu::append_to_cache(problem.params(), {});
    EXPECT_EQ(kept_key.host(), narrowed<T>(problem.kept_key)) << c.name;
    EXPECT_EQ(kept_value.host(), narrowed<T>(problem.kept_value)) << c.name;
  }
}

TEST(CudaAppendToCache, EveryPositionGoesToItsPage) {
  for (const cache_test::Case& c : cache_test::cases()) {
    for (const std::size_t offset : {std::size_t{0}, std::size_t{1}}) {
      check<std::uint32_t>(c, offset);
      check<std::uint16_t>(c, offset);
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
