/// Single queries on CUDA, and keys in pages on every path, beside the definition.

#include <algorithm>
#include <vector>

#include "tests/kernels/attention_problem.hpp"
#include "tests/kernels/cuda/device_buffer.hpp"

namespace tessera::kernels {
namespace {

using namespace attention_test;
using test::DeviceBuffer;
using test::DeviceStream;

/// o and lse of forward over keys and values that lie as `shape` says.
template <typename T>
Outputs<T> run(const Problem<T>& p, AttentionShape shape, const std::vector<T>& k, const std::vector<T>& v,
               const std::vector<std::int32_t>& pages = {}) {
  const DeviceStream stream;
  const DeviceBuffer<T> q(stream, p.q), keys(stream, k), values(stream, v),
      o(stream, std::vector<T>(p.q.size(), T(kUntouched)));
  const DeviceBuffer<float> slopes(stream, p.slopes), bias(stream, p.bias),
      lse(stream, std::vector<float>(static_cast<std::size_t>(shape.batch * shape.heads * shape.seq_q)));
  const DeviceBuffer<std::int32_t> key_begin(stream, p.config.key_begin), key_end(stream, p.config.key_end),
      table(stream, pages);
  if (shape.alibi_slopes) shape.alibi_slopes = slopes.data();
  if (shape.bias) shape.bias = bias.data();
  if (shape.key_begin) shape.key_begin = key_begin.data();
  if (shape.key_end) shape.key_end = key_end.data();
  if (shape.pages) shape.pages = table.data();
  const DeviceBuffer<unsigned char> space(
      stream, std::vector<unsigned char>(cuda::attention_forward_workspace(shape, 0), 0xff));
  cuda::attention_forward({shape, q.data(), keys.data(), values.data(), o.data(), lse.data(), space.data()},
                          stream.launch());
  return {o.host(), {}, {}, {}, lse.host()};
}

template <typename T>
void expect_defined(const Case& c, const Outputs<T>& actual, const Results& expected, double tolerance) {
  expect_close("o", actual.o, expected.o, c.heads * c.d, tolerance);
  for (std::size_t i = 0; i < actual.lse.size(); ++i) {
    if (std::isinf(expected.lse[i])) {
      ASSERT_EQ(actual.lse[i], -std::numeric_limits<float>::infinity()) << "row " << i;
    } else {
      ASSERT_NEAR(actual.lse[i], expected.lse[i], 2e-5) << "row " << i;
    }
  }
}

template <typename T>
void check(const Case& c, double tolerance) {
  SKIP_WITHOUT_CUDA();
  const Problem<T> problem(c);
  const Paged<T> paged(problem);
  const Results expected = reference(problem);
  expect_defined(c, run(problem, paged.shape, paged.k, paged.v, paged.pages), expected, tolerance);
  SCOPED_TRACE("where keys lie together");
  expect_defined(c, run(problem, problem.shape, problem.k, problem.v), expected, tolerance);
}

// clang-format off
const Case kCases[] = {
    {.name = "one"},
    {.name = "one_feature", .batch = 2, .seq_k = 70, .d = 1, .query_offset = 69},
    {.name = "one_head_a_key", .batch = 2, .seq_k = 129, .heads = 3, .kv_heads = 3, .d = 64, .query_offset = 128},
    {.name = "pairs", .batch = 2, .seq_k = 300, .heads = 4, .kv_heads = 2, .d = 128, .query_offset = 299},
    {.name = "threes", .seq_k = 260, .heads = 6, .kv_heads = 2, .d = 40, .query_offset = 259},
    {.name = "sevens", .seq_k = 200, .heads = 7, .kv_heads = 1, .d = 80, .query_offset = 199},
    {.name = "twelves", .batch = 2, .seq_k = 140, .heads = 24, .kv_heads = 2, .d = 16, .query_offset = 139},
    {.name = "widest", .seq_k = 150, .heads = 2, .kv_heads = 1, .d = 256, .query_offset = 149},
    {.name = "wide_and_odd", .seq_k = 150, .heads = 3, .kv_heads = 1, .d = 250, .query_offset = 149},
    {.name = "too_wide", .seq_k = 70, .heads = 2, .kv_heads = 1, .d = 264, .query_offset = 69},
    {.name = "odd", .batch = 2, .seq_k = 201, .heads = 2, .d = 17, .query_offset = 200},
    {.name = "full", .seq_k = 129, .heads = 2, .d = 24, .causal = false},
    {.name = "inside", .seq_k = 400, .d = 8, .query_offset = 127},
    {.name = "lengths", .batch = 5, .seq_k = 300, .heads = 6, .kv_heads = 2, .d = 20, .causal = false, .query_offset = 299, .key_end = {300, 1, 128, 129, 0}},
    {.name = "ranges", .batch = 4, .seq_k = 300, .heads = 2, .d = 8, .causal = false, .key_begin = {0, 127, 130, 299}, .key_end = {3, 129, 290, 300}},
    {.name = "outside", .batch = 3, .seq_k = 130, .d = 8, .causal = false, .key_begin = {-3, 140, 90}, .key_end = {999, 200, -5}},
    {.name = "window", .batch = 2, .seq_k = 300, .heads = 6, .kv_heads = 2, .d = 20, .query_offset = 299, .window = 150},
    {.name = "alibi", .batch = 2, .seq_k = 200, .heads = 5, .kv_heads = 5, .d = 20, .alibi = true, .query_offset = 199},
    {.name = "softcap", .batch = 2, .seq_k = 200, .heads = 5, .d = 17, .query_offset = 199, .window = 77, .softcap = 0.7f},
    {.name = "bias", .batch = 2, .seq_k = 70, .heads = 4, .kv_heads = 2, .d = 8, .causal = false, .bias = true},
    {.name = "chunk", .batch = 2, .seq_q = 33, .seq_k = 129, .heads = 6, .kv_heads = 2, .d = 8, .query_offset = 96, .key_end = {129, 100}},
    {.name = "chunk_alibi", .seq_q = 5, .seq_k = 70, .heads = 3, .kv_heads = 3, .d = 20, .alibi = true, .query_offset = 65},
    {.name = "chunk_window", .batch = 2, .seq_q = 33, .seq_k = 200, .heads = 2, .d = 20, .query_offset = 167, .window = 50},
};
// clang-format on

class CudaPages : public testing::TestWithParam<Case> {};

TEST_P(CudaPages, Float32) { check<float>(GetParam(), 2e-6); }
TEST_P(CudaPages, Bfloat16) { check<bfloat16>(GetParam(), 8e-3); }
TEST_P(CudaPages, Float16) { check<float16>(GetParam(), 1e-3); }

INSTANTIATE_TEST_SUITE_P(Shapes, CudaPages, testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

/// A text's bits are its own: neither the keys that others have nor those that a recorded pass might see
/// matter.
TEST(CudaDecode, ASampleDependsOnItsOwnKeysAlone) {
  SKIP_WITHOUT_CUDA();
  const Case c{.name = "",
               .batch = 3,
               .seq_k = 400,
               .heads = 4,
               .kv_heads = 2,
               .d = 64,
               .causal = false,
               .key_end = {400, 130, 70}};
  const Problem<bfloat16> problem(c);
  const Paged<bfloat16> paged(problem);
  const Outputs<bfloat16> together = run(problem, paged.shape, paged.k, paged.v, paged.pages);
  for (const std::int64_t keys : {130, 256, 300}) {
    AttentionShape shape = paged.shape;
    shape.seq_k = keys;
    const Outputs<bfloat16> shorter = run(problem, shape, paged.k, paged.v, paged.pages);
    for (const std::int64_t b : {1, 2}) {
      for (std::int64_t h = 0; h < c.heads; ++h) {
        for (std::int64_t i = 0; i < c.d; ++i) {
          const std::size_t n = at(shape.o_stride, 0, b, h) + static_cast<std::size_t>(i);
          ASSERT_EQ(shorter.o[n].bits, together.o[n].bits) << keys << " keys, sample " << b;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
