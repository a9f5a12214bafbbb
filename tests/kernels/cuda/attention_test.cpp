/// Attention on CUDA, whole and by our own path cut into small blocks, beside the CPU's and the definition.

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cuda/attention_cudnn.hpp"
#include "kernels/cuda/attention_own.hpp"
#include "tessera/base/error.hpp"
#include "tests/kernels/attention_problem.hpp"
#include "tests/kernels/cuda/device_buffer.hpp"

namespace tessera::kernels {
namespace {

using namespace attention_test;
using test::DeviceBuffer;
using test::DeviceStream;

/// Blocks of this size are the launcher's own choice, by whatever path it takes.
constexpr std::size_t kLauncher = 0;

/// A problem's operands and masks in device memory.
template <typename T>
struct DeviceProblem {
  const DeviceStream& stream;
  AttentionShape shape;
  DeviceBuffer<T> q, k, v, d_o;
  DeviceBuffer<float> slopes, bias;
  DeviceBuffer<std::int32_t> documents, key_begin, key_end;

  DeviceProblem(const DeviceStream& on, const Problem<T>& p)
      : stream(on),
        shape(p.shape),
        q(on, p.q),
        k(on, p.k),
        v(on, p.v),
        d_o(on, p.d_o),
        slopes(on, p.slopes),
        bias(on, p.bias),
        documents(on, p.documents),
        key_begin(on, p.config.key_begin),
        key_end(on, p.config.key_end) {
    if (shape.alibi_slopes) shape.alibi_slopes = slopes.data();
    if (shape.bias) shape.bias = bias.data();
    if (shape.document) shape.document = documents.data();
    if (shape.key_begin) shape.key_begin = key_begin.data();
    if (shape.key_end) shape.key_end = key_end.data();
  }
};

void forward(const AttentionForward& call, std::size_t block_bytes, const Launch& launch) {
  if (block_bytes == kLauncher) return cuda::attention_forward(call, launch);
  cuda::own_attention_forward(call, launch, block_bytes);
}

void backward(const AttentionBackward& call, std::size_t block_bytes, const Launch& launch) {
  if (block_bytes == kLauncher) return cuda::attention_backward(call, launch);
  cuda::own_attention_backward(call, launch, block_bytes);
}

std::size_t forward_bytes(const AttentionShape& shape, std::size_t block_bytes) {
  return block_bytes == kLauncher ? cuda::attention_forward_workspace(shape, 0)
                                  : cuda::own_attention_forward_workspace(shape, block_bytes);
}

std::size_t backward_bytes(const AttentionShape& shape, std::size_t block_bytes) {
  return block_bytes == kLauncher ? cuda::attention_backward_workspace(shape, 0)
                                  : cuda::own_attention_backward_workspace(shape, block_bytes);
}

template <typename T>
Outputs<T> run(const Problem<T>& p, std::size_t block_bytes) {
  const DeviceStream stream;
  const DeviceProblem<T> device(stream, p);
  const AttentionShape& s = device.shape;
  const std::vector<T> q_fill(p.q.size(), T(kUntouched)), k_fill(p.k.size(), T(kUntouched));
  const DeviceBuffer<T> o(stream, q_fill), dq(stream, q_fill), dk(stream, k_fill), dv(stream, k_fill);
  const DeviceBuffer<float> lse(stream,
                                std::vector<float>(static_cast<std::size_t>(s.batch * s.heads * s.seq_q)));
  const DeviceBuffer<float> dbias(stream, std::vector<float>(p.bias.size(), kUntouched));
  // Garbage in the scratch must not show.
  const DeviceBuffer<unsigned char> forward_space(
      stream, std::vector<unsigned char>(forward_bytes(s, block_bytes), 0xff));
  const DeviceBuffer<unsigned char> backward_space(
      stream, std::vector<unsigned char>(backward_bytes(s, block_bytes), 0xff));
  forward({s, device.q.data(), device.k.data(), device.v.data(), o.data(), lse.data(), forward_space.data()},
          block_bytes, stream.launch());
  backward({s, device.q.data(), device.k.data(), device.v.data(), o.data(), lse.data(), device.d_o.data(),
            dq.data(), dk.data(), dv.data(), backward_space.data(), dbias.data()},
           block_bytes, stream.launch());
  return {o.host(), dq.host(), dk.host(), dv.host(), lse.host(), dbias.host()};
}

template <typename T>
std::vector<double> widened(const std::vector<T>& values) {
  std::vector<double> wide;
  for (const T value : values) wide.push_back(static_cast<float>(value));
  return wide;
}

template <typename T>
Results widened(const Outputs<T>& out) {
  return {widened(out.o),  widened(out.lse), widened(out.dq),
          widened(out.dk), widened(out.dv),  widened(out.dbias)};
}

template <typename T>
void expect_like(const Case& c, const Outputs<T>& actual, const Results& expected, double tolerance) {
  const std::int64_t q_row = c.heads * c.d, k_row = c.kv_heads * c.d;
  expect_close("o", actual.o, expected.o, q_row, tolerance, c.gap);
  expect_close("dq", actual.dq, expected.dq, q_row, tolerance, c.gap);
  expect_close("dk", actual.dk, expected.dk, k_row, tolerance, c.gap);
  expect_close("dv", actual.dv, expected.dv, k_row, tolerance, c.gap);
  expect_bias_close(actual.dbias, expected.dbias, tolerance);
  for (std::size_t i = 0; i < actual.lse.size(); ++i) {
    if (std::isinf(expected.lse[i])) {
      ASSERT_EQ(actual.lse[i], -std::numeric_limits<float>::infinity()) << "row " << i;
    } else {
      ASSERT_NEAR(actual.lse[i], expected.lse[i], 2e-5 * c.range * c.range) << "row " << i;
    }
  }
}

template <typename T>
void check(const Case& c, double tolerance) {
  SKIP_WITHOUT_CUDA();
  const Problem<T> problem(c);
  const Results defined = reference(problem), on_cpu = widened(run_on_cpu(problem, 2));
  // The launcher's choice; one block; blocks of some heads; blocks of sixteen queries of one head.
  for (const std::size_t block_bytes :
       {kLauncher, std::size_t{64} << 20, std::size_t{96} << 10, std::size_t{1}}) {
    SCOPED_TRACE(testing::Message() << "blocks of " << block_bytes << " bytes");
    const Outputs<T> actual = run(problem, block_bytes);
    expect_like(c, actual, defined, tolerance);
    expect_like(c, actual, on_cpu, 2 * tolerance);
  }
}

// clang-format off
const Case kCases[] = {
    {.name = "one"},
    {.name = "short_rows", .batch = 2, .seq_q = 5, .seq_k = 5, .heads = 3, .kv_heads = 3, .d = 20},
    {.name = "odd", .batch = 2, .seq_q = 33, .seq_k = 33, .heads = 3, .kv_heads = 3, .d = 20},
    {.name = "full", .seq_q = 70, .seq_k = 70, .heads = 3, .kv_heads = 1, .d = 8, .causal = false},
    {.name = "grouped", .batch = 2, .seq_q = 70, .seq_k = 70, .heads = 6, .kv_heads = 2, .d = 64},
    {.name = "one_kv_head", .seq_q = 129, .seq_k = 129, .heads = 3, .kv_heads = 1, .d = 80},
    {.name = "wide", .seq_q = 33, .seq_k = 33, .heads = 6, .kv_heads = 3, .d = 128},
    {.name = "many_rows", .seq_q = 530, .seq_k = 530, .heads = 2, .kv_heads = 1, .d = 8},
    {.name = "long_rows", .seq_q = 5, .seq_k = 1100, .d = 8, .causal = false},
    {.name = "longer_rows", .seq_q = 3, .seq_k = 2100, .d = 8, .causal = false, .documents = true},
    {.name = "longest_in_registers", .seq_q = 2, .seq_k = 8190, .d = 8, .causal = false},
    {.name = "streamed", .seq_q = 3, .seq_k = 8301, .d = 8, .query_offset = 8298, .dropout = 0.2f},
    {.name = "cross", .batch = 2, .seq_q = 5, .seq_k = 129, .heads = 3, .kv_heads = 1, .d = 20, .causal = false},
    {.name = "offset", .batch = 2, .seq_q = 33, .seq_k = 129, .heads = 6, .kv_heads = 2, .d = 8, .query_offset = 96},
    {.name = "offset_inside", .seq_q = 33, .seq_k = 129, .d = 8, .query_offset = 40},
    {.name = "before_the_keys", .seq_q = 33, .seq_k = 33, .d = 8, .query_offset = -7},
    {.name = "decode", .batch = 2, .seq_q = 1, .seq_k = 129, .heads = 6, .kv_heads = 2, .d = 64, .query_offset = 128},
    {.name = "decode_one_kv_head", .batch = 3, .seq_q = 1, .seq_k = 70, .heads = 3, .kv_heads = 1, .d = 20, .query_offset = 69},
    {.name = "decode_masked", .batch = 3, .seq_q = 1, .seq_k = 70, .heads = 3, .kv_heads = 3, .d = 80, .query_offset = 60, .key_begin = {0, 59, 61}, .key_end = {70, 60, 70}},
    {.name = "alibi", .seq_q = 70, .seq_k = 70, .heads = 3, .kv_heads = 3, .d = 20, .alibi = true},
    {.name = "left_padding", .batch = 3, .seq_q = 33, .seq_k = 33, .heads = 1, .d = 8, .key_begin = {0, 5, 32}},
    {.name = "right_padding", .batch = 3, .seq_q = 33, .seq_k = 33, .heads = 1, .d = 8, .causal = false, .key_end = {33, 32, 1}},
    {.name = "key_ranges", .batch = 4, .seq_q = 70, .seq_k = 70, .d = 8, .key_begin = {3, 50, 30, 60}, .key_end = {70, 51, 30, 40}},
    {.name = "outside_the_keys", .batch = 4, .seq_q = 5, .seq_k = 5, .d = 8, .causal = false, .key_begin = {-3, 9, 7, 2}, .key_end = {99, 200, 8, -5}},
    {.name = "all_masked", .batch = 2, .seq_q = 33, .seq_k = 33, .d = 8, .causal = false, .key_end = {0, 33}},
    {.name = "documents", .batch = 2, .seq_q = 129, .seq_k = 129, .heads = 2, .kv_heads = 2, .d = 20, .documents = true},
    {.name = "documents_full", .batch = 2, .seq_q = 70, .seq_k = 70, .heads = 2, .d = 8, .causal = false, .documents = true},
    {.name = "dropout", .batch = 2, .seq_q = 33, .seq_k = 33, .heads = 3, .kv_heads = 3, .d = 20, .dropout = 0.3f},
    {.name = "everything", .batch = 3, .seq_q = 70, .seq_k = 129, .heads = 6, .kv_heads = 2, .d = 20, .alibi = true, .documents = true, .query_offset = 51, .key_begin = {0, 9, 60}, .key_end = {129, 100, 127}, .dropout = 0.1f},
    {.name = "everything_full", .batch = 2, .seq_q = 70, .seq_k = 129, .heads = 6, .kv_heads = 3, .d = 17, .causal = false, .alibi = true, .documents = true, .query_offset = 51, .key_begin = {2, 9}, .key_end = {120, 100}, .dropout = 0.2f},
    {.name = "window", .batch = 2, .seq_q = 129, .seq_k = 129, .heads = 6, .kv_heads = 2, .d = 20, .window = 37},
    {.name = "window_and_offset", .batch = 2, .seq_q = 33, .seq_k = 129, .heads = 2, .d = 8, .documents = true, .query_offset = 96, .key_begin = {0, 90}, .dropout = 0.2f, .window = 40},
    {.name = "decode_window", .batch = 2, .seq_q = 1, .seq_k = 129, .heads = 6, .kv_heads = 2, .d = 20, .query_offset = 128, .window = 50},
    {.name = "softcap", .batch = 2, .seq_q = 70, .seq_k = 70, .heads = 6, .kv_heads = 2, .d = 20, .range = 3.0f, .softcap = 2.0f},
    {.name = "softcap_window_dropout", .batch = 2, .seq_q = 33, .seq_k = 33, .heads = 2, .d = 17, .documents = true, .dropout = 0.3f, .window = 9, .softcap = 0.5f},
    {.name = "bias", .batch = 2, .seq_q = 70, .seq_k = 70, .heads = 3, .kv_heads = 3, .d = 20, .bias = true},
    {.name = "bias_full", .batch = 2, .seq_q = 33, .seq_k = 129, .heads = 6, .kv_heads = 2, .d = 8, .causal = false, .key_begin = {2, 9}, .key_end = {120, 100}, .dropout = 0.2f, .bias = true},
    {.name = "bias_long_rows", .seq_q = 5, .seq_k = 1100, .heads = 2, .kv_heads = 2, .d = 8, .causal = false, .bias = true},
    {.name = "bias_one_query", .batch = 2, .seq_q = 1, .seq_k = 33, .heads = 4, .kv_heads = 2, .d = 8, .causal = false, .bias = true},
    {.name = "large_scores", .seq_q = 70, .seq_k = 70, .heads = 2, .kv_heads = 2, .d = 64, .range = 6.0f},
    // Rows that begin on 16 bytes: 16-bit operands take the fused kernel.
    {.name = "fused", .batch = 2, .seq_q = 70, .seq_k = 70, .heads = 6, .kv_heads = 2, .d = 64, .gap = 8},
    {.name = "fused_two_queries", .batch = 3, .seq_q = 2, .seq_k = 3, .heads = 5, .kv_heads = 5, .d = 64, .causal = false, .gap = 8},
    {.name = "fused_one_kv_head", .seq_q = 129, .seq_k = 129, .heads = 3, .kv_heads = 1, .d = 80, .gap = 8},
    {.name = "fused_wide", .seq_q = 67, .seq_k = 67, .heads = 4, .kv_heads = 2, .d = 128, .gap = 8},
    {.name = "fused_full", .batch = 2, .seq_q = 70, .seq_k = 129, .heads = 3, .kv_heads = 3, .d = 24, .causal = false, .key_end = {129, 65}, .gap = 8},
    {.name = "fused_few_queries", .batch = 2, .seq_q = 5, .seq_k = 200, .heads = 2, .d = 16, .query_offset = 195, .gap = 8},
    {.name = "fused_before_the_keys", .seq_q = 70, .seq_k = 70, .d = 8, .query_offset = -40, .gap = 8},
    {.name = "fused_outside_the_keys", .batch = 4, .seq_q = 5, .seq_k = 5, .d = 8, .causal = false, .key_begin = {-3, 9, 7, 2}, .key_end = {99, 200, 8, -5}, .gap = 8},
    {.name = "fused_all_masked", .batch = 2, .seq_q = 70, .seq_k = 70, .d = 8, .causal = false, .key_end = {0, 70}, .gap = 8},
    {.name = "fused_alibi", .seq_q = 70, .seq_k = 70, .heads = 3, .kv_heads = 3, .d = 24, .alibi = true, .gap = 8},
    {.name = "fused_documents", .batch = 2, .seq_q = 200, .seq_k = 200, .heads = 2, .kv_heads = 2, .d = 16, .documents = true, .gap = 8},
    {.name = "fused_window", .batch = 2, .seq_q = 260, .seq_k = 260, .heads = 2, .d = 16, .window = 37, .gap = 8},
    {.name = "fused_dropout", .batch = 2, .seq_q = 70, .seq_k = 70, .heads = 3, .kv_heads = 3, .d = 64, .dropout = 0.3f, .gap = 8},
    {.name = "fused_softcap", .seq_q = 70, .seq_k = 70, .heads = 6, .kv_heads = 2, .d = 40, .dropout = 0.2f, .range = 3.0f, .softcap = 2.0f, .gap = 8},
    {.name = "fused_everything", .batch = 3, .seq_q = 70, .seq_k = 129, .heads = 6, .kv_heads = 2, .d = 24, .alibi = true, .documents = true, .query_offset = 51, .key_begin = {0, 9, 60}, .key_end = {129, 100, 127}, .dropout = 0.1f, .gap = 8},
    {.name = "fused_everything_full", .batch = 2, .seq_q = 70, .seq_k = 129, .heads = 6, .kv_heads = 3, .d = 96, .causal = false, .alibi = true, .documents = true, .query_offset = 51, .key_begin = {2, 9}, .key_end = {120, 100}, .dropout = 0.2f, .window = 60, .gap = 8},
    {.name = "fused_bias", .batch = 2, .seq_q = 150, .seq_k = 150, .heads = 3, .kv_heads = 3, .d = 64, .bias = true, .gap = 8},
    {.name = "fused_bias_full", .batch = 2, .seq_q = 70, .seq_k = 200, .heads = 4, .kv_heads = 2, .d = 128, .causal = false, .key_begin = {2, 70}, .key_end = {190, 100}, .dropout = 0.2f, .bias = true, .gap = 8},
    {.name = "fused_large_scores", .seq_q = 70, .seq_k = 70, .heads = 2, .kv_heads = 2, .d = 64, .range = 6.0f, .gap = 8},
};
// clang-format on

class CudaAttention : public testing::TestWithParam<Case> {};

TEST_P(CudaAttention, Float32) { check<float>(GetParam(), GetParam().range > 1.0f ? 4e-5 : 2e-6); }
TEST_P(CudaAttention, Bfloat16) { check<bfloat16>(GetParam(), GetParam().range > 1.0f ? 2e-2 : 8e-3); }
TEST_P(CudaAttention, Float16) { check<float16>(GetParam(), GetParam().range > 1.0f ? 2.5e-3 : 1e-3); }

INSTANTIATE_TEST_SUITE_P(Shapes, CudaAttention, testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

/// With values that are rows of the unit matrix o holds the probabilities: the same ones are dropped as on
/// the CPU, wherever the step's number lies.
template <typename T>
void check_dropped(std::int64_t gap) {
  SKIP_WITHOUT_CUDA();
  Case c{.name = "", .batch = 2, .seq_q = 61, .seq_k = 61, .heads = 3, .kv_heads = 3, .d = 64};
  c.dropout = 0.4f, c.gap = gap;
  Problem<T> problem(c);
  problem.shape.sample0 = std::int64_t{1} << 33;  // rows beyond 32 bits
  std::fill(problem.v.begin(), problem.v.end(), T(0.0f));
  for (std::int64_t b = 0; b < c.batch; ++b) {
    for (std::int64_t h = 0; h < c.heads; ++h) {
      for (std::int64_t j = 0; j < c.seq_k; ++j)
        problem.v[at(problem.shape.v_stride, j, b, h) + static_cast<std::size_t>(j)] = T(1.0f);
    }
  }
  const Outputs<T> expected = run_on_cpu(problem, 1);
  const DeviceStream stream;
  const DeviceBuffer<std::uint32_t> step(stream, {problem.shape.dropout_key.step});
  for (const std::size_t block_bytes : {kLauncher, std::size_t{20} << 10}) {
    const Outputs<T> actual = run(problem, block_bytes);
    const RngKey key = problem.shape.dropout_key;
    problem.shape.dropout_key.step += 1;
    problem.shape.dropout_key.step_at = step.data();
    const Outputs<T> later = run(problem, block_bytes);
    problem.shape.dropout_key = key;
    for (std::size_t i = 0; i < later.o.size(); ++i)
      ASSERT_EQ(static_cast<float>(later.o[i]), static_cast<float>(actual.o[i])) << i;
    std::size_t dropped = 0;
    for (std::size_t i = 0; i < actual.o.size(); ++i) {
      const bool is_zero = static_cast<float>(actual.o[i]) == 0.0f;
      ASSERT_EQ(is_zero, static_cast<float>(expected.o[i]) == 0.0f) << i;
      dropped += is_zero ? 1 : 0;
    }
    EXPECT_GT(dropped, actual.o.size() / 2);  // what is above the diagonal, and two fifths of the rest
    EXPECT_LT(dropped, actual.o.size() * 9 / 10);
  }
}

TEST(CudaAttentionDropout, SameBitsAsCpu) {
  check_dropped<float>(5);
  check_dropped<bfloat16>(8);
}

/// q, k and v as views of one [seq, batch, kv_heads (group + 2) d] buffer, gradients written into another: as
/// the models do. The operands start and lie so that cuDNN could take them.
template <typename T>
void check_packed(std::int64_t kv_heads, double tolerance) {
  SKIP_WITHOUT_CUDA();
  const std::int64_t seq = 33, batch = 2, heads = 4, d = 16, group = heads / kv_heads;
  const std::int64_t row = kv_heads * (group + 2) * d;
  // Heads of KV head 0, its key, its value, heads of KV head 1, ...: only a group's heads have one stride, so
  // there is one KV head or one query head for each.
  const std::int64_t head = group == 1 ? 3 * d : d;
  AttentionShape shape;
  shape.batch = batch, shape.seq_q = shape.seq_k = seq;
  shape.heads = heads, shape.kv_heads = kv_heads, shape.head_dim = d;
  shape.dtype = dtype_of<T>::value;
  shape.q_stride = {batch * row, row, head};
  shape.k_stride = shape.v_stride = {batch * row, row, 3 * d};
  shape.o_stride = {batch * heads * d, heads * d, d};
  shape.scale = 0.25f;
  const auto qkv = uniform<T>(static_cast<std::size_t>(seq * batch * row), 1.0f, 7);
  const auto d_o = uniform<T>(static_cast<std::size_t>(seq * batch * heads * d), 1.0f, 8);
  const std::size_t statistics = static_cast<std::size_t>(batch * heads * seq);
  std::vector<T> o(d_o.size()), d_qkv(qkv.size());
  std::vector<float> lse(statistics);
  const auto forward_of = [&](const T* x, T* to, float* sums, void* space) {
    return AttentionForward{shape, x, x + group * d, x + (group + 1) * d, to, sums, space};
  };
  const auto backward_of = [&](const T* x, const T* from, const float* sums, const T* upstream, T* dx,
                               void* space) {
    return AttentionBackward{shape,    x,  x + group * d,  x + (group + 1) * d,  from, sums,
                             upstream, dx, dx + group * d, dx + (group + 1) * d, space};
  };
  std::vector<char> space(
      std::max(cpu::attention_forward_workspace(shape, 1), cpu::attention_backward_workspace(shape, 1)));
  cpu::attention_forward(forward_of(qkv.data(), o.data(), lse.data(), space.data()), {});
  cpu::attention_backward(
      backward_of(qkv.data(), o.data(), lse.data(), d_o.data(), d_qkv.data(), space.data()), {});
  const DeviceStream stream;
  const DeviceBuffer<T> x(stream, qkv), upstream(stream, d_o), dx(stream, std::vector<T>(qkv.size())),
      out(stream, std::vector<T>(d_o.size()));
  const DeviceBuffer<float> sums(stream, std::vector<float>(statistics));
  for (const std::size_t block_bytes : {kLauncher, std::size_t{12} << 10}) {
    SCOPED_TRACE(testing::Message() << "blocks of " << block_bytes << " bytes");
    const DeviceBuffer<char> scratch(stream, std::vector<char>(std::max(forward_bytes(shape, block_bytes),
                                                                        backward_bytes(shape, block_bytes))));
    forward(forward_of(x.data(), out.data(), sums.data(), scratch.data()), block_bytes, stream.launch());
    backward(backward_of(x.data(), out.data(), sums.data(), upstream.data(), dx.data(), scratch.data()),
             block_bytes, stream.launch());
    const auto expect_same = [&](const auto& actual, const auto& expected) {
      ASSERT_EQ(actual.size(), expected.size());
      for (std::size_t i = 0; i < actual.size(); ++i)
        ASSERT_NEAR(static_cast<float>(actual[i]), static_cast<float>(expected[i]), tolerance) << i;
    };
    expect_same(out.host(), o);
    expect_same(sums.host(), lse);
    expect_same(dx.host(), d_qkv);
  }
}

TEST(CudaAttentionViews, PackedQkv) {
  check_packed<float>(4, 2e-5);
  check_packed<bfloat16>(4, 0.04);
}
TEST(CudaAttentionViews, PackedQkvOneKvHead) {
  check_packed<float>(1, 2e-5);
  check_packed<bfloat16>(1, 0.04);
}

/// A NaN must reach the output of the queries that see it, and of no others.
template <typename T>
void check_nan(const Case& c) {
  SKIP_WITHOUT_CUDA();
  Problem<T> problem(c);
  problem.k[at(problem.shape.k_stride, 20, 0, 0) + 3] = T(std::numeric_limits<float>::quiet_NaN());
  const Outputs<T> out = run(problem, kLauncher);
  for (std::int64_t i = 0; i < 67; ++i) {
    EXPECT_EQ(std::isnan(static_cast<float>(out.o[at(problem.shape.o_stride, i, 0, 0)])), i >= 20)
        << "query " << i;
  }
}

TEST(CudaAttentionViews, NanComesThrough) {
  check_nan<float>({.name = "", .seq_q = 67, .seq_k = 67, .d = 12});
  check_nan<bfloat16>({.name = "", .seq_q = 67, .seq_k = 67, .d = 16, .gap = 8});
}

/// Without an lse to write, forward gives the same o.
template <typename T>
void check_without_lse(const Case& c) {
  SKIP_WITHOUT_CUDA();
  const Problem<T> p(c);
  const Outputs<T> expected = run(p, kLauncher);
  const DeviceStream stream;
  const DeviceProblem<T> device(stream, p);
  const DeviceBuffer<T> o(stream, std::vector<T>(p.q.size(), T(kUntouched)));
  const DeviceBuffer<char> space(stream, std::vector<char>(cuda::attention_forward_workspace(p.shape, 0)));
  cuda::attention_forward(
      {device.shape, device.q.data(), device.k.data(), device.v.data(), o.data(), nullptr, space.data()},
      stream.launch());
  EXPECT_EQ(widened(o.host()), widened(expected.o));
}

TEST(CudaAttentionViews, LseIsOptional) {
  check_without_lse<float>({.name = "", .seq_q = 33, .seq_k = 33, .d = 12});
  check_without_lse<float16>({.name = "", .seq_q = 33, .seq_k = 33, .d = 16, .gap = 8});
}

/// Without queries there are no gradients, and without keys no outputs.
TEST(CudaAttentionViews, NothingToDo) {
  SKIP_WITHOUT_CUDA();
  const DeviceStream stream;
  AttentionShape shape;
  shape.batch = 2, shape.seq_k = 3, shape.heads = 2, shape.kv_heads = 1, shape.head_dim = 4;
  shape.q_stride = shape.o_stride = {16, 8, 4};
  shape.k_stride = shape.v_stride = {8, 4, 4};
  const DeviceBuffer<float> some(stream, std::vector<float>(48, 1.0f)),
      dk(stream, std::vector<float>(24, 1.0f)), dv(stream, std::vector<float>(24, 1.0f)),
      lse(stream, std::vector<float>(12, 1.0f));
  const DeviceBuffer<char> space(stream, std::vector<char>(cuda::attention_backward_workspace(shape, 0)));
  cuda::attention_backward({shape, some.data(), some.data(), some.data(), some.data(), lse.data(),
                            some.data(), some.data(), dk.data(), dv.data(), space.data()},
                           stream.launch());
  EXPECT_EQ(dk.host(), std::vector<float>(24));
  EXPECT_EQ(dv.host(), std::vector<float>(24));
  shape.seq_q = 3, shape.seq_k = 0;
  const DeviceBuffer<char> more(stream, std::vector<char>(cuda::attention_forward_workspace(shape, 0)));
  cuda::attention_forward({shape, dk.data(), dk.data(), dk.data(), some.data(), lse.data(), more.data()},
                          stream.launch());
  EXPECT_EQ(some.host(), std::vector<float>(48));
  EXPECT_EQ(lse.host(), std::vector<float>(12, -std::numeric_limits<float>::infinity()));
}

/// dQ, dK and dV, packed, by a way of going backward.
std::vector<bfloat16> gradients(const DeviceStream& stream, const AttentionShape& s,
                                const DeviceBuffer<bfloat16>& qkv, bool own) {
  const std::size_t queries = static_cast<std::size_t>(s.batch * s.heads * s.seq_q);
  const std::int64_t k_at = s.heads * s.head_dim, v_at = k_at + s.kv_heads * s.head_dim;
  const DeviceBuffer<bfloat16> o(stream,
                                 std::vector<bfloat16>(queries * static_cast<std::size_t>(s.head_dim))),
      d(stream, std::vector<bfloat16>(qkv.host().size()));
  const DeviceBuffer<float> lse(stream, std::vector<float>(queries));
  const DeviceBuffer<char> space(
      stream, std::vector<char>(
                  std::max({cuda::attention_forward_workspace(s, 0), cuda::attention_backward_workspace(s, 0),
                            cuda::own_attention_backward_workspace(s)})));
  const bfloat16* q = qkv.data();
  cuda::attention_forward({s, q, q + k_at, q + v_at, o.data(), lse.data(), space.data()}, stream.launch());
  // What came out serves as its own gradient: values like any.
  const AttentionBackward call{s,        q,        q + k_at,        q + v_at,        o.data(),    lse.data(),
                               o.data(), d.data(), d.data() + k_at, d.data() + v_at, space.data()};
  own ? cuda::own_attention_backward(call, stream.launch()) : cuda::attention_backward(call, stream.launch());
  return d.host();
}

class CudaCudnnBackward : public testing::TestWithParam<std::int64_t> {};
INSTANTIATE_TEST_SUITE_P(Windows, CudaCudnnBackward, testing::Values(0, 1000));

/// Forty heads of 4096 queries and keys: more than one piece (docs/floors/kernels.md).
TEST_P(CudaCudnnBackward, InPiecesAndInAnyOrderEqualsOurOwn) {
  SKIP_WITHOUT_CUDA();
  AttentionShape s;
  s.window = GetParam();
  s.batch = 1, s.seq_q = s.seq_k = s.seq_length = 4096;
  s.heads = s.total_heads = 40, s.kv_heads = 8, s.head_dim = 64;
  s.dtype = DType::bf16;
  s.scale = 0.125f;
  const std::int64_t row = (s.heads + 2 * s.kv_heads) * s.head_dim;
  s.q_stride = s.k_stride = s.v_stride = {row, row, s.head_dim};
  s.o_stride = {s.heads * s.head_dim, s.heads * s.head_dim, s.head_dim};
  if (const std::string why = cuda::cudnn_refusal(s, true, false); !why.empty()) GTEST_SKIP() << why;
  const DeviceStream stream;
  std::vector<bfloat16> values;
  for (std::int64_t i = 0; i < s.seq_q * row; ++i)
    values.push_back(bfloat16(static_cast<float>(i * 7919 % 1009) / 504.0f - 1.0f));
  const DeviceBuffer<bfloat16> qkv(stream, values);
  const std::vector<bfloat16> own = gradients(stream, s, qkv, true),
                              ordered = gradients(stream, s, qkv, false);
  EXPECT_TRUE(
      std::equal(ordered.begin(), ordered.end(), gradients(stream, s, qkv, false).begin(),
                 [](bfloat16 a, bfloat16 b) { return static_cast<float>(a) == static_cast<float>(b); }))
      << "in a fixed order the same bits";
  s.deterministic = false;
  const std::vector<bfloat16> any = gradients(stream, s, qkv, false);
  float largest = 0.0f, of_ordered = 0.0f, of_any = 0.0f;
  for (std::size_t i = 0; i < own.size(); ++i) {
    const auto expected = static_cast<float>(own[i]);
    largest = std::max(largest, std::abs(expected));
    of_ordered = std::max(of_ordered, std::abs(static_cast<float>(ordered[i]) - expected));
    of_any = std::max(of_any, std::abs(static_cast<float>(any[i]) - expected));
  }
  EXPECT_GT(largest, 0.0f);
  EXPECT_LE(of_ordered, 2e-2f * largest);
  EXPECT_LE(of_any, 2e-2f * largest);
}

/// Scratch stays within the bytes of a block, wherever one head's sixteen queries do.
TEST(CudaAttentionWorkspace, IsBounded) {
  SKIP_WITHOUT_CUDA();
  AttentionShape shape;
  shape.batch = 8, shape.seq_q = shape.seq_k = 8192;
  shape.heads = 32, shape.kv_heads = 8, shape.head_dim = 128;
  shape.dtype = DType::bf16;
  for (const bool causal : {true, false}) {
    shape.causal = causal;
    for (const std::size_t bytes :
         {std::size_t{16} << 20, std::size_t{64} << 20, cuda::kAttentionBlockBytes}) {
      const std::size_t ranges = 8 * 8192 * 8 + 2048;
      EXPECT_LE(cuda::own_attention_forward_workspace(shape, bytes), bytes + ranges);
      EXPECT_GE(cuda::own_attention_forward_workspace(shape, bytes), bytes / 2);
      EXPECT_LE(cuda::own_attention_backward_workspace(shape, bytes), bytes + ranges);
      EXPECT_GE(cuda::own_attention_backward_workspace(shape, bytes), bytes / 2);
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
