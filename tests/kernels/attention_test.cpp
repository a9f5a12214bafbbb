#include "tests/kernels/attention_problem.hpp"

namespace tessera::kernels {
namespace {

using namespace attention_test;

template <typename T>
void check(const Case& c, double tolerance) {
  const Problem<T> problem(c);
  const Results expected = reference(problem);
  const Outputs<T> one = run_on_cpu(problem, 1);
  const std::int64_t q_row = c.heads * c.d, k_row = c.kv_heads * c.d;
  expect_close("o", one.o, expected.o, q_row, tolerance);
  expect_close("dq", one.dq, expected.dq, q_row, tolerance);
  expect_close("dk", one.dk, expected.dk, k_row, tolerance);
  expect_close("dv", one.dv, expected.dv, k_row, tolerance);
  expect_bias_close(one.dbias, expected.dbias, tolerance);
  for (std::size_t i = 0; i < one.lse.size(); ++i) {
    if (std::isinf(expected.lse[i])) {
      ASSERT_EQ(one.lse[i], -std::numeric_limits<float>::infinity()) << "row " << i;
    } else {
      ASSERT_NEAR(one.lse[i], expected.lse[i], 2e-5 * c.range * c.range) << "row " << i;
    }
  }
  EXPECT_TRUE(one == run_on_cpu(problem, 2)) << "2 threads";
  EXPECT_TRUE(one == run_on_cpu(problem, 3)) << "3 threads";
}

const Case kCases[] = {
    {.name = "one"},
    {.name = "one_feature", .seq_q = 17, .seq_k = 17, .d = 1},
    {.name = "two", .batch = 3, .seq_q = 2, .seq_k = 2, .heads = 5, .kv_heads = 5, .d = 12},
    {.name = "odd", .batch = 2, .seq_q = 17, .seq_k = 17, .heads = 5, .kv_heads = 5, .d = 12},
    {.name = "prime", .batch = 2, .seq_q = 67, .seq_k = 67, .heads = 1, .d = 40},
    {.name = "prime_full",
     .batch = 1,
     .seq_q = 67,
     .seq_k = 67,
     .heads = 5,
     .kv_heads = 5,
     .d = 8,
     .causal = false},
    {.name = "grouped", .batch = 1, .seq_q = 129, .seq_k = 129, .heads = 12, .kv_heads = 4, .d = 64},
    {.name = "one_kv_head", .batch = 1, .seq_q = 200, .seq_k = 200, .heads = 7, .kv_heads = 1, .d = 80},
    {.name = "several_key_blocks",
     .batch = 1,
     .seq_q = 300,
     .seq_k = 300,
     .heads = 2,
     .kv_heads = 2,
     .d = 64},
    {.name = "parts", .batch = 1, .seq_q = 1100, .seq_k = 1100, .heads = 1, .kv_heads = 1, .d = 16},
    {.name = "wide", .batch = 1, .seq_q = 67, .seq_k = 67, .heads = 2, .kv_heads = 1, .d = 128},
    {.name = "widest",
     .batch = 1,
     .seq_q = 33,
     .seq_k = 65,
     .heads = 1,
     .kv_heads = 1,
     .d = 256,
     .causal = false},
    {.name = "cross",
     .batch = 2,
     .seq_q = 17,
     .seq_k = 200,
     .heads = 5,
     .kv_heads = 1,
     .d = 40,
     .causal = false},
    {.name = "offset",
     .batch = 2,
     .seq_q = 67,
     .seq_k = 200,
     .heads = 4,
     .kv_heads = 2,
     .d = 64,
     .query_offset = 133},
    {.name = "offset_inside", .batch = 1, .seq_q = 70, .seq_k = 200, .heads = 1, .d = 12, .query_offset = 61},
    {.name = "decode",
     .batch = 2,
     .seq_q = 1,
     .seq_k = 200,
     .heads = 12,
     .kv_heads = 4,
     .d = 64,
     .query_offset = 199},
    {.name = "decode_tail",
     .batch = 1,
     .seq_q = 3,
     .seq_k = 301,
     .heads = 7,
     .kv_heads = 1,
     .d = 40,
     .alibi = true,
     .query_offset = 298},
    {.name = "decode_masked",
     .batch = 3,
     .seq_q = 1,
     .seq_k = 150,
     .heads = 2,
     .kv_heads = 2,
     .d = 80,
     .query_offset = 140,
     .key_begin = {0, 139, 141},
     .key_end = {150, 140, 150}},
    {.name = "alibi",
     .batch = 1,
     .seq_q = 129,
     .seq_k = 129,
     .heads = 5,
     .kv_heads = 5,
     .d = 40,
     .alibi = true},
    {.name = "alibi_full",
     .batch = 1,
     .seq_q = 67,
     .seq_k = 67,
     .heads = 2,
     .kv_heads = 2,
     .d = 16,
     .causal = false,
     .alibi = true},
    {.name = "left_padding",
     .batch = 3,
     .seq_q = 129,
     .seq_k = 129,
     .heads = 2,
     .kv_heads = 2,
     .d = 12,
     .key_begin = {0, 5, 128}},
    {.name = "right_padding",
     .batch = 3,
     .seq_q = 67,
     .seq_k = 67,
     .heads = 2,
     .kv_heads = 1,
     .d = 12,
     .causal = false,
     .key_end = {67, 66, 1}},
    {.name = "key_ranges",
     .batch = 4,
     .seq_q = 200,
     .seq_k = 200,
     .heads = 1,
     .kv_heads = 1,
     .d = 8,
     .key_begin = {3, 100, 70, 150},
     .key_end = {200, 101, 70, 140}},
    {.name = "all_masked",
     .batch = 2,
     .seq_q = 67,
     .seq_k = 67,
     .heads = 1,
     .kv_heads = 1,
     .d = 8,
     .causal = false,
     .key_end = {0, 67}},
    {.name = "documents",
     .batch = 2,
     .seq_q = 200,
     .seq_k = 200,
     .heads = 2,
     .kv_heads = 2,
     .d = 40,
     .documents = true},
    {.name = "documents_full",
     .batch = 2,
     .seq_q = 129,
     .seq_k = 129,
     .heads = 2,
     .kv_heads = 1,
     .d = 12,
     .causal = false,
     .documents = true},
    {.name = "dropout",
     .batch = 2,
     .seq_q = 67,
     .seq_k = 67,
     .heads = 5,
     .kv_heads = 5,
     .d = 12,
     .dropout = 0.3f},
    {.name = "dropout_cross",
     .batch = 1,
     .seq_q = 3,
     .seq_k = 200,
     .heads = 4,
     .kv_heads = 2,
     .d = 8,
     .query_offset = 150,
     .dropout = 0.5f},
    {.name = "everything",
     .batch = 3,
     .seq_q = 150,
     .seq_k = 201,
     .heads = 6,
     .kv_heads = 2,
     .d = 40,
     .alibi = true,
     .documents = true,
     .query_offset = 51,
     .key_begin = {0, 9, 60},
     .key_end = {201, 160, 199},
     .dropout = 0.1f},
    {.name = "everything_full",
     .batch = 2,
     .seq_q = 150,
     .seq_k = 201,
     .heads = 6,
     .kv_heads = 2,
     .d = 17,
     .causal = false,
     .alibi = true,
     .documents = true,
     .query_offset = 51,
     .key_begin = {2, 9},
     .key_end = {190, 160},
     .dropout = 0.2f},
    {.name = "window",
     .batch = 2,
     .seq_q = 300,
     .seq_k = 300,
     .heads = 6,
     .kv_heads = 2,
     .d = 40,
     .window = 37},
    {.name = "window_of_one", .seq_q = 67, .seq_k = 67, .d = 12, .window = 1},
    {.name = "window_and_offset",
     .batch = 2,
     .seq_q = 67,
     .seq_k = 200,
     .heads = 2,
     .d = 12,
     .documents = true,
     .query_offset = 133,
     .key_begin = {0, 150},
     .dropout = 0.2f,
     .window = 70},
    {.name = "window_full", .seq_q = 129, .seq_k = 129, .d = 12, .causal = false, .window = 20},
    {.name = "decode_window",
     .batch = 2,
     .seq_q = 1,
     .seq_k = 200,
     .heads = 6,
     .kv_heads = 2,
     .d = 40,
     .query_offset = 199,
     .window = 130},
    {.name = "softcap",
     .batch = 2,
     .seq_q = 129,
     .seq_k = 129,
     .heads = 6,
     .kv_heads = 2,
     .d = 40,
     .range = 3.0f,
     .softcap = 2.0f},
    {.name = "softcap_window_dropout",
     .batch = 2,
     .seq_q = 67,
     .seq_k = 67,
     .heads = 2,
     .d = 17,
     .documents = true,
     .dropout = 0.3f,
     .window = 9,
     .softcap = 0.5f},
    {.name = "decode_softcap",
     .batch = 2,
     .seq_q = 1,
     .seq_k = 200,
     .heads = 5,
     .d = 17,
     .query_offset = 199,
     .window = 77,
     .softcap = 0.7f},
    {.name = "bias_one", .bias = true},
    {.name = "bias", .batch = 2, .seq_q = 67, .seq_k = 67, .heads = 3, .kv_heads = 3, .d = 5, .bias = true},
    {.name = "bias_full",
     .batch = 2,
     .seq_q = 150,
     .seq_k = 201,
     .heads = 6,
     .kv_heads = 2,
     .d = 17,
     .causal = false,
     .key_begin = {2, 9},
     .key_end = {190, 160},
     .dropout = 0.2f,
     .bias = true},
    {.name = "bias_parts", .batch = 1, .seq_q = 1100, .seq_k = 1100, .heads = 1, .d = 16, .bias = true},
    {.name = "bias_few_queries",
     .batch = 2,
     .seq_q = 3,
     .seq_k = 140,
     .heads = 2,
     .kv_heads = 2,
     .d = 8,
     .causal = false,
     .key_end = {140, 0},
     .bias = true},
    {.name = "large_scores",
     .batch = 1,
     .seq_q = 129,
     .seq_k = 129,
     .heads = 2,
     .kv_heads = 2,
     .d = 64,
     .range = 6.0f},
};

class Attention : public testing::TestWithParam<Case> {};

TEST_P(Attention, Float32) { check<float>(GetParam(), GetParam().range > 1.0f ? 4e-5 : 1e-6); }
TEST_P(Attention, Bfloat16) { check<bfloat16>(GetParam(), GetParam().range > 1.0f ? 2e-2 : 6e-3); }
TEST_P(Attention, Float16) { check<float16>(GetParam(), GetParam().range > 1.0f ? 2.5e-3 : 8e-4); }

INSTANTIATE_TEST_SUITE_P(Shapes, Attention, testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

/// Keys in pages give the bits that they give where they lie together.
template <typename T>
void check_pages(const Case& c) {
  const Problem<T> problem(c);
  const Paged<T> paged(problem);
  const Outputs<T> expected = run_on_cpu(problem, 1);
  for (const int threads : {1, 2}) {
    std::vector<T> o(problem.q.size(), T(kUntouched));
    std::vector<float> lse(expected.lse.size());
    std::vector<unsigned char> space(cpu::attention_forward_workspace(paged.shape, threads), 0xff);
    cpu::attention_forward(
        {paged.shape, problem.q.data(), paged.k.data(), paged.v.data(), o.data(), lse.data(), space.data()},
        {nullptr, threads});
    EXPECT_TRUE((Outputs<T>{o, {}, {}, {}, lse}) == (Outputs<T>{expected.o, {}, {}, {}, expected.lse}))
        << threads << " threads";
  }
}

TEST_P(Attention, PagedFloat32) { check_pages<float>(GetParam()); }
TEST_P(Attention, PagedBfloat16) { check_pages<bfloat16>(GetParam()); }
TEST_P(Attention, PagedFloat16) { check_pages<float16>(GetParam()); }

/// q, k and v as views of one [seq, batch, 3 heads d] buffer, gradients written into another: as the models
/// do.
TEST(AttentionViews, PackedQkv) {
  const std::int64_t seq = 67, batch = 2, heads = 5, d = 12, row = 3 * heads * d;
  Case c{.name = "", .batch = batch, .seq_q = seq, .seq_k = seq, .heads = heads, .kv_heads = heads, .d = d};
  const Problem<float> apart(c);
  const Outputs<float> expected = run_on_cpu(apart, 1);
  AttentionShape shape = apart.shape;
  shape.q_stride = shape.k_stride = shape.v_stride = {batch * row, row, d};
  std::vector<float> qkv(static_cast<std::size_t>(seq * batch * row)), gradient(qkv.size());
  const auto part = [&](std::vector<float>& buffer, int which) { return buffer.data() + which * heads * d; };
  const auto for_all = [&](auto&& visit) {
    for (std::int64_t i = 0; i < seq * batch; ++i) {
      for (std::int64_t f = 0; f < heads * d; ++f)
        visit(static_cast<std::size_t>(i * row + f), static_cast<std::size_t>(i * (heads * d + 5) + f));
    }
  };
  for_all([&](std::size_t packed, std::size_t single) {
    part(qkv, 0)[packed] = apart.q[single];
    part(qkv, 1)[packed] = apart.k[single];
    part(qkv, 2)[packed] = apart.v[single];
  });
  std::vector<float> o(apart.q.size()), lse(expected.lse.size());
  std::vector<char> space(
      std::max(cpu::attention_forward_workspace(shape, 2), cpu::attention_backward_workspace(shape, 2)));
  const Launch launch{nullptr, 2};
  cpu::attention_forward(
      {shape, part(qkv, 0), part(qkv, 1), part(qkv, 2), o.data(), lse.data(), space.data()}, launch);
  cpu::attention_backward(
      {shape, part(qkv, 0), part(qkv, 1), part(qkv, 2), o.data(), lse.data(), apart.d_o.data(),
       part(gradient, 0), part(gradient, 1), part(gradient, 2), space.data()},
      launch);
  for_all([&](std::size_t packed, std::size_t single) {
    ASSERT_EQ(o[single], expected.o[single]);
    ASSERT_EQ(part(gradient, 0)[packed], expected.dq[single]);
    ASSERT_EQ(part(gradient, 1)[packed], expected.dk[single]);
    ASSERT_EQ(part(gradient, 2)[packed], expected.dv[single]);
  });
}

/// A NaN must reach the output of the queries that see it, and of no others.
TEST(AttentionViews, NanComesThrough) {
  Case c{.name = "", .seq_q = 67, .seq_k = 67, .d = 12};
  Problem<float> problem(c);
  problem.k[at(problem.shape.k_stride, 20, 0, 0) + 3] = std::numeric_limits<float>::quiet_NaN();
  const Outputs<float> out = run_on_cpu(problem, 1);
  for (std::int64_t i = 0; i < 67; ++i) {
    EXPECT_EQ(std::isnan(out.o[at(problem.shape.o_stride, i, 0, 0)]), i >= 20) << "query " << i;
  }
}

/// Without an lse to write, forward gives the same o.
TEST(AttentionViews, LseIsOptional) {
  Case c{.name = "", .seq_q = 67, .seq_k = 67, .d = 12};
  const Problem<float> p(c);
  const Outputs<float> expected = run_on_cpu(p, 1);
  std::vector<float> o(p.q.size(), kUntouched);
  std::vector<char> space(cpu::attention_forward_workspace(p.shape, 1));
  cpu::attention_forward({p.shape, p.q.data(), p.k.data(), p.v.data(), o.data(), nullptr, space.data()},
                         {nullptr, 1});
  EXPECT_EQ(o, expected.o);
}

}  // namespace
}  // namespace tessera::kernels
