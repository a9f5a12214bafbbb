/// Ops on the meta device: checked and described as ever, and nothing is launched.

#include <gtest/gtest.h>

#include "tessera/device/trace.hpp"
#include "tessera/ops/attention.hpp"
#include "tessera/ops/elementwise.hpp"
#include "tessera/ops/gemm.hpp"

namespace tessera {
namespace {

/// The work of one lane: what was done, one after the other.
std::vector<Work> traced(const ExecCtx& ctx, const std::function<void()>& run) {
  const auto trace = std::make_shared<Trace>(*ctx.stream);
  ctx.stream->set_trace(trace);
  run();
  ctx.stream->set_trace(nullptr);
  std::vector<Work> work;
  const std::vector<TraceLane> lanes = trace->lanes();
  for (const TimedWork& timed : lanes.at(0).work) work.push_back(timed.work);
  return work;
}

void multiply_and_attend(const ExecCtx& ctx) {
  const Tensor a = Tensor::empty(ctx, {24, 40}, DType::f32), b = Tensor::empty(ctx, {40, 16}, DType::f32);
  ops::fill_zero(ctx, a);
  ops::fill_zero(ctx, b);
  ops::matmul(ctx, a, b, {.out = DType::f32});
  const Tensor q = Tensor::empty(ctx, {8, 2, 4, 16}, DType::f32);
  ops::fill_zero(ctx, q);
  ops::attention(ctx, q, q, q, {});
}

TEST(MetaOps, AreTheWorkAndMemoryOfRealOnes) {
  const ExecCtx meta = ExecCtx::meta(), cpu = ExecCtx::cpu(1);
  const std::vector<Work> dry = traced(meta, [&] { multiply_and_attend(meta); }),
                          real = traced(cpu, [&] { multiply_and_attend(cpu); });
  ASSERT_EQ(dry.size(), real.size());
  double flops = 0;
  for (std::size_t i = 0; i < dry.size(); ++i) {
    EXPECT_EQ(dry[i].name, real[i].name);
    EXPECT_EQ(dry[i].flops, real[i].flops);
    EXPECT_EQ(dry[i].bytes, real[i].bytes);
    if (dry[i].kind == WorkKind::gemm) flops += dry[i].flops;
  }
  EXPECT_EQ(flops, 2.0 * 24 * 40 * 16);
  EXPECT_EQ(meta.allocator->stats().peak_used_bytes, cpu.allocator->stats().peak_used_bytes);
}

TEST(MetaOps, RefuseWhatRealOnesRefuse) {
  const ExecCtx ctx = ExecCtx::meta();
  const Tensor a = Tensor::empty(ctx, {2, 3}, DType::f32), b = Tensor::empty(ctx, {4, 3}, DType::f32);
  EXPECT_THROW(ops::matmul(ctx, a, b, {.out = DType::f32}), InvalidArgument);
}

}  // namespace
}  // namespace tessera
