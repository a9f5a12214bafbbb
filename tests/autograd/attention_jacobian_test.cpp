/// Self-attention against central differences: grouped heads, rotary, ALiBi, key ranges, documents, dropout.

#include "tests/support/gradcheck.hpp"

#include "tessera/parallel/functions.hpp"
#include "tests/support/device.hpp"

namespace tessera {
namespace {

using test::expect_gradients;
using test::make_parameter;
using test::random_tensor;

struct Heads {
  std::int64_t heads, kv_heads, head_dim;
};

class AttentionJacobian : public ::testing::TestWithParam<int> {
 protected:
  SelfAttentionOptions options(const Heads& h) const {
    SelfAttentionOptions o;
    o.heads = h.heads;
    o.kv_heads = h.kv_heads;
    o.head_dim = h.head_dim;
    return o;
  }
  Tensor ints(std::vector<std::int32_t> values, const Shape& shape) const {
    return Tensor::from(ctx, values, shape);
  }
  Tensor packed(const Heads& h, std::int64_t seq, std::int64_t batch) const {
    return random_tensor(ctx, {seq, batch, (h.heads + 2 * h.kv_heads) * h.head_dim}, 81, 1.5f);
  }
  void check(const Heads& h, std::int64_t seq, std::int64_t batch, const SelfAttentionOptions& o) {
    expect_gradients(ctx,
                     {{packed(h, seq, batch)},
                      {},
                      [&](const ExecCtx& c, std::vector<Var> in) { return self_attention(c, in[0], o); }},
                     3e-3, 5e-3f);
  }

  ExecCtx ctx = test::context(GetParam(), 3);
};
INSTANTIATE_TEST_SUITE_P(Threads, AttentionJacobian, ::testing::Values(1, 2));

TEST_P(AttentionJacobian, HeadsAndSizes) {
  for (const Heads& h : {Heads{1, 1, 1}, Heads{2, 2, 3}, Heads{4, 2, 3}, Heads{3, 1, 5}}) {
    check(h, 5, 2, options(h));
    check(h, 1, 1, options(h));
    SelfAttentionOptions all = options(h);
    all.attention.causal = false;
    all.attention.scale = 0.7f;
    check(h, 3, 1, all);
  }
}

TEST_P(AttentionJacobian, Rotary) {
  const Heads h{2, 1, 6};
  for (const bool interleaved : {false, true}) {
    for (const std::int64_t rotary : {6, 4}) {
      const ops::RopeTable table =
          ops::make_rope_table(ctx, 9, rotary, {.theta = 100.0, .interleaved = interleaved});
      SelfAttentionOptions o = options(h);
      o.rope = &table;
      o.positions = ints({0, 4, 1, 5, 2, 6, 3, 7}, {8});
      check(h, 4, 2, o);
    }
  }
}

TEST_P(AttentionJacobian, RotaryWrittenInPlace) {
  // The output of a linear moved in: rotation and nothing else may overwrite it.
  const Heads h{2, 1, 4};
  const auto weight = make_parameter(ctx, "weight", {(2 + 2) * 4, 5}, 83);
  const ops::RopeTable table = ops::make_rope_table(ctx, 9, 4, {.theta = 100.0});
  SelfAttentionOptions o = options(h);
  o.rope = &table;
  o.positions = ints({0, 1, 2, 3}, {4});
  expect_gradients(ctx,
                   {{random_tensor(ctx, {4, 1, 5}, 85)},
                    {weight.get()},
                    [&](const ExecCtx& c, std::vector<Var> in) {
                      return self_attention(c, linear(c, in[0], *weight, nullptr), o);
                    }},
                   3e-3, 5e-3f);
}

TEST_P(AttentionJacobian, Alibi) {
  const Heads h{3, 3, 2};
  SelfAttentionOptions o = options(h);
  o.attention.alibi_slopes = Tensor::from(ctx, std::vector<float>{0.5f, 0.25f, 0.0625f}, {3});
  check(h, 6, 2, o);
}

TEST_P(AttentionJacobian, KeyRangesWithRowsThatSeeNothing) {
  const Heads h{2, 1, 3};
  SelfAttentionOptions o = options(h);
  o.attention.key_begin = ints({2, 0, 1}, {3});
  o.attention.key_end = ints({5, 3, 1}, {3});  // padded left, padded right, nothing at all
  check(h, 5, 3, o);
}

TEST_P(AttentionJacobian, Documents) {
  const Heads h{2, 2, 3};
  SelfAttentionOptions o = options(h);
  o.attention.document = ints({0, 0, 1, 1, 2, 2, 0, 0, 0, 0, 0, 1}, {2, 6});
  check(h, 6, 2, o);
}

TEST_P(AttentionJacobian, DropoutOnProbabilities) {
  const Heads h{4, 2, 3};
  SelfAttentionOptions o = options(h);
  o.attention.dropout = 0.35f;
  o.attention.dropout_key = {5, site_of("probabilities"), 9};
  o.attention.sample0 = 4;
  o.attention.seq_length = 6;
  check(h, 6, 2, o);
}

TEST_P(AttentionJacobian, Everything) {
  const Heads h{4, 2, 4};
  const ops::RopeTable table = ops::make_rope_table(ctx, 16, 4, {.theta = 50.0, .interleaved = true});
  SelfAttentionOptions o = options(h);
  o.rope = &table;
  o.positions = ints({0, 0, 1, 1, 2, 0, 3, 1, 0, 2, 1, 3, 2, 4}, {14});
  o.attention.alibi_slopes = Tensor::from(ctx, std::vector<float>{0.5f, 0.25f, 0.125f, 0.0625f}, {4});
  o.attention.key_begin = ints({1, 0}, {2});
  o.attention.key_end = ints({7, 6}, {2});
  o.attention.document = ints({0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1}, {2, 7});
  o.attention.dropout = 0.2f;
  o.attention.dropout_key = {5, site_of("probabilities"), 9};
  o.attention.seq_length = 7;
  check(h, 7, 2, o);
}

}  // namespace
}  // namespace tessera
