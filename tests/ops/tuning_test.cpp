/// Which products a trace recorded.

#include "tessera/ops/tuning.hpp"

#include <gtest/gtest.h>

#include "tessera/ops/elementwise.hpp"
#include "tessera/ops/gemm.hpp"
#include "tests/support/device.hpp"

namespace tessera {
namespace {

TEST(RecordedProducts, EachKeyOnceInTheOrderOfFirstUse) {
  const ExecCtx ctx = test::context();
  const Tensor x = Tensor::empty(ctx, {6, 8}, DType::f32), w = Tensor::empty(ctx, {16, 8}, DType::f32),
               dw = Tensor::empty(ctx, {16, 8}, DType::f32);
  for (const Tensor& tensor : {x, w, dw}) ops::fill_zero(ctx, tensor);
  const auto trace = std::make_shared<Trace>(*ctx.stream);
  ctx.stream->set_trace(trace);
  const Tensor y = ops::linear(ctx, x, w, {});
  ops::linear(ctx, x, w, {});
  ops::linear_backward_weight(ctx, y, x, dw, 1.0f);
  ops::linear_backward_weight(ctx, y, x, dw, 0.0f);
  ops::add(ctx, x, x, DType::f32);
  ctx.stream->set_trace(nullptr);
  const auto products = ops::recorded_products(trace->lanes());
  ASSERT_EQ(products.size(), 3u);
  EXPECT_EQ(products[0].shape, "6 x 16 x 8, B transposed");
  EXPECT_EQ(products[0].dtypes, "float32");
  EXPECT_EQ(products[0].fused, "");
  EXPECT_EQ(products[0].count, 2);
  EXPECT_EQ(products[0].flops, 2.0 * 6 * 16 * 8);
  EXPECT_EQ(products[1].shape, "16 x 8 x 6, A transposed");
  EXPECT_EQ(products[1].fused, "+=");
  EXPECT_EQ(products[2].fused, "");
  EXPECT_EQ(products[2].count, 1);
}

TEST(RecordedProducts, ColumnSumsWithinAProductMakeItAnother) {
  const ExecCtx ctx = test::context();
  const Tensor x = Tensor::empty(ctx, {6, 8}, DType::bf16), dy = Tensor::empty(ctx, {6, 16}, DType::bf16),
               dw = Tensor::empty(ctx, {16, 8}, DType::f32), db = Tensor::empty(ctx, {16}, DType::f32);
  for (const Tensor& tensor : {x, dy, dw, db}) ops::fill_zero(ctx, tensor);
  const auto trace = std::make_shared<Trace>(*ctx.stream);
  ctx.stream->set_trace(trace);
  ops::linear_backward_weight(ctx, dy, x, dw, 1.0f);
  for (int micro_batch = 0; micro_batch < 2; ++micro_batch)
    ops::linear_backward_weight(ctx, dy, x, dw, 1.0f, db, 1.0f);
  ctx.stream->set_trace(nullptr);
  const auto products = ops::recorded_products(trace->lanes());
  ASSERT_EQ(products.size(), 2u);
  EXPECT_EQ(products[0].fused, "+=");
  EXPECT_EQ(products[1].fused, "+=, column sums");
  EXPECT_EQ(products[1].count, 2);
  EXPECT_EQ(products[1].flops, products[0].flops);
}

TEST(RecordedProducts, OffsetsThatChangeTheAlignmentAreOtherProducts) {
  const ExecCtx ctx = test::context();
  const Tensor all = Tensor::empty(ctx, {4, 9}, DType::f32), w = Tensor::empty(ctx, {16, 8}, DType::f32);
  for (const Tensor& tensor : {all, w}) ops::fill_zero(ctx, tensor);
  const auto trace = std::make_shared<Trace>(*ctx.stream);
  ctx.stream->set_trace(trace);
  ops::linear(ctx, all.narrow(1, 0, 8), w, {});
  ops::linear(ctx, all.narrow(1, 1, 8), w, {});
  ctx.stream->set_trace(nullptr);
  EXPECT_EQ(ops::recorded_products(trace->lanes()).size(), 2u);
}

}  // namespace
}  // namespace tessera
