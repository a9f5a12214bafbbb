#include "tessera/tensor/tensor.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "tessera/tensor/host_copy.hpp"
#include "tests/support/errors.hpp"

namespace tessera {
namespace {

std::vector<float> counting(std::int64_t n) {
  std::vector<float> values(static_cast<std::size_t>(n));
  std::iota(values.begin(), values.end(), 0.0f);
  return values;
}

Tensor counting(const ExecCtx& ctx, Shape shape) { return Tensor::from(ctx, counting(shape.numel()), shape); }

/// Elements of a rank-2 view through its strides.
std::vector<float> elements(const Tensor& t) {
  std::vector<float> found;
  for (std::int64_t i = 0; i < t.size(0); ++i) {
    for (std::int64_t j = 0; j < t.size(1); ++j) {
      found.push_back(t.data<float>()[i * t.strides()[0] + j * t.strides()[1]]);
    }
  }
  return found;
}

void expect_in(const std::string& message, const std::vector<std::string>& parts) {
  for (const auto& part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << part << " not in: " << message;
}

class TensorTest : public testing::Test {
 protected:
  ExecCtx ctx = ExecCtx::cpu(1);
};

TEST_F(TensorTest, AnUndefinedTensorTestsFalse) {
  const Tensor t;
  EXPECT_FALSE(t);
  EXPECT_EQ(t.raw(), nullptr);
  EXPECT_FALSE(t.is_unique());
}

TEST_F(TensorTest, EmptyHasRowMajorStrides) {
  const Tensor t = Tensor::empty(ctx, {2, 3, 5}, DType::bf16);
  EXPECT_TRUE(t);
  EXPECT_EQ(t.strides(), (Shape{15, 5, 1}));
  EXPECT_EQ(t.numel(), 30);
  EXPECT_EQ(t.nbytes(), 60u);
  EXPECT_EQ(t.size(-1), 5);
  EXPECT_EQ(t.rank(), 3);
  EXPECT_TRUE(t.is_contiguous());
  EXPECT_TRUE(t.device().is_cpu());
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(t.raw()) % 64, 0u);
}

TEST_F(TensorTest, ScalarsAndTensorsWithoutElements) {
  const Tensor scalar = Tensor::from(ctx, std::vector<float>{4.5f}, Shape{});
  EXPECT_EQ(scalar.numel(), 1);
  EXPECT_EQ(scalar.to_vector<float>(), std::vector<float>{4.5f});
  const Tensor none = Tensor::empty(ctx, {0, 7}, DType::f32);
  EXPECT_TRUE(none);
  EXPECT_EQ(none.numel(), 0);
  EXPECT_TRUE(none.to_vector<float>().empty());
  EXPECT_EQ(none.view({7, 0}).shape(), (Shape{7, 0}));
}

TEST_F(TensorTest, CopiesValuesInAndOut) {
  const Tensor t = counting(ctx, {3, 4});
  EXPECT_EQ(t.to_vector<float>(), counting(12));
  const std::vector<std::int32_t> ids = {5, -1, 7};
  EXPECT_EQ(Tensor::from(ctx, ids, {3}).to_vector<std::int32_t>(), ids);
  expect_in(test::message_of<InvalidArgument>([&] {
              Tensor::from(ctx, ids, {2, 2});
            }),
            {"3 is not 4", "[2, 2]"});
}

TEST_F(TensorTest, FloatsOfEitherFloatDtype) {
  const Tensor t = Tensor::from(ctx, std::vector<bfloat16>{bfloat16(1.5f), bfloat16(-3.0f)}, {2});
  EXPECT_EQ(t.to_floats(), (std::vector<float>{1.5f, -3.0f}));
  EXPECT_EQ(counting(ctx, {3}).to_floats(), counting(3));
  expect_in(test::message_of<InvalidArgument>([&] { Tensor::empty(ctx, {2}, DType::i32).to_floats(); }),
            {"int32"});
}

TEST_F(TensorTest, DataIsTypeChecked) {
  const Tensor t = Tensor::empty(ctx, {2}, DType::bf16);
  expect_in(test::message_of<InvalidArgument>([&] { t.data<float>(); }), {"bfloat16", "float32"});
  expect_in(test::message_of<InvalidArgument>([&] { t.to_vector<float>(); }), {"bfloat16", "float32"});
}

TEST_F(TensorTest, ViewsShareMemory) {
  const Tensor t = counting(ctx, {2, 6});
  const Tensor v = t.view({3, 4});
  EXPECT_EQ(v.shape(), (Shape{3, 4}));
  EXPECT_EQ(v.strides(), (Shape{4, 1}));
  v.data<float>()[0] = 100;
  EXPECT_EQ(t.data<float>()[0], 100);
  EXPECT_EQ(t.view({-1}).shape(), (Shape{12}));
  EXPECT_EQ(t.view({2, -1, 3}).shape(), (Shape{2, 2, 3}));
  EXPECT_EQ(t.view(Shape{12, 1, 1}).shape(), (Shape{12, 1, 1}));
}

TEST_F(TensorTest, ImpossibleViewsNameTheShapes) {
  const Tensor t = counting(ctx, {2, 6});
  expect_in(test::message_of<InvalidArgument>([&] { t.view({5, 3}); }), {"[2, 6]", "[5, 3]", "15", "12"});
  expect_in(test::message_of<InvalidArgument>([&] { t.view({-1, 5}); }), {"[2, 6]", "5"});
  expect_in(test::message_of<InvalidArgument>([&] { t.view({-1, -1}); }), {"only one"});
  expect_in(test::message_of<InvalidArgument>([&] { t.view({-1, 0}); }), {"[2, 6]"});
  expect_in(test::message_of<InvalidArgument>([&] { t.transpose(0, 1).view({12}); }),
            {"contiguous", "[6, 2]", "[1, 6]"});
}

TEST_F(TensorTest, NarrowTakesAStretchOfOneDimension) {
  const Tensor t = counting(ctx, {3, 4});
  const Tensor rows = t.narrow(0, 1, 2);
  EXPECT_TRUE(rows.is_contiguous());
  EXPECT_EQ(rows.to_vector<float>(), (std::vector<float>{4, 5, 6, 7, 8, 9, 10, 11}));
  const Tensor cols = t.narrow(1, 1, 2);
  EXPECT_FALSE(cols.is_contiguous());
  EXPECT_EQ(cols.strides(), (Shape{4, 1}));
  EXPECT_EQ(elements(cols), (std::vector<float>{1, 2, 5, 6, 9, 10}));
  EXPECT_EQ(elements(rows.narrow(1, 3, 1)), (std::vector<float>{7, 11}));
  EXPECT_EQ(elements(t.narrow(-1, 3, 1)), (std::vector<float>{3, 7, 11}));
  EXPECT_EQ(t.narrow(0, 3, 0).numel(), 0);
  EXPECT_EQ(t.narrow(1, 0, 4).to_vector<float>(), counting(12));
}

TEST_F(TensorTest, NarrowBeyondTheEndNamesTheRange) {
  const Tensor t = counting(ctx, {3, 4});
  expect_in(test::message_of<InvalidArgument>([&] { t.narrow(1, 2, 3); }),
            {"[2, 5)", "dimension 1", "[3, 4]"});
  expect_in(test::message_of<InvalidArgument>([&] { t.narrow(0, -1, 2); }), {"[-1, 1)", "[3, 4]"});
  expect_in(test::message_of<InvalidArgument>([&] { t.narrow(0, 2, -1); }), {"[3, 4]"});
  expect_in(test::message_of<InvalidArgument>([&] { t.narrow(2, 0, 1); }), {"dimension 2", "rank 2"});
}

TEST_F(TensorTest, TransposeSwapsTwoDimensions) {
  const Tensor t = counting(ctx, {2, 3});
  const Tensor swapped = t.transpose(0, 1);
  EXPECT_EQ(swapped.shape(), (Shape{3, 2}));
  EXPECT_EQ(swapped.strides(), (Shape{1, 3}));
  EXPECT_FALSE(swapped.is_contiguous());
  EXPECT_EQ(elements(swapped), (std::vector<float>{0, 3, 1, 4, 2, 5}));
  EXPECT_EQ(swapped.raw(), t.raw());
  EXPECT_TRUE(swapped.transpose(-1, -2).is_contiguous());
  EXPECT_TRUE(
      counting(ctx, {1, 5}).transpose(0, 1).is_contiguous());  // a stride of one element does not matter
  expect_in(test::message_of<InvalidArgument>([&] { t.transpose(0, 2); }), {"dimension 2", "rank 2"});
}

TEST_F(TensorTest, HostCopiesNeedContiguousTensors) {
  const Tensor t = counting(ctx, {2, 3}).transpose(0, 1);
  std::vector<float> host(6);
  expect_in(test::message_of<InvalidArgument>([&] { t.copy_to_host(host.data()); }),
            {"contiguous", "[1, 3]"});
  expect_in(test::message_of<InvalidArgument>([&] { t.copy_from_host(host.data()); }),
            {"contiguous", "[1, 3]"});
  expect_in(test::message_of<InvalidArgument>([&] { t.to_floats(); }), {"contiguous", "[1, 3]"});
}

TEST_F(TensorTest, MemoryReturnsWithTheLastView) {
  Tensor view;
  {
    const Tensor t = Tensor::empty(ctx, {1000}, DType::f32);
    EXPECT_TRUE(t.is_unique());
    view = t.narrow(0, 500, 10);
    EXPECT_FALSE(t.is_unique());
  }
  EXPECT_TRUE(view.is_unique());
  EXPECT_GE(ctx.allocator->stats().used_bytes, 4000u);
  view = Tensor();
  EXPECT_EQ(ctx.allocator->stats().used_bytes, 0u);
}

TEST_F(TensorTest, ATensorOutlivesItsContext) {
  Tensor t;
  {
    const ExecCtx other = ExecCtx::cpu(1);
    t = counting(other, {5});
  }
  EXPECT_EQ(t.to_vector<float>(), counting(5));
}

TEST_F(TensorTest, WrapHoldsTheOwner) {
  auto owner = std::make_shared<std::vector<float>>(counting(6));
  Tensor t = Tensor::wrap(owner->data(), {2, 3}, DType::f32, owner);
  EXPECT_EQ(owner.use_count(), 2);
  const Tensor row = t.narrow(0, 1, 1);
  t = Tensor();
  EXPECT_EQ(owner.use_count(), 2);
  EXPECT_EQ(row.to_vector<float>(), (std::vector<float>{3, 4, 5}));
  float local[2] = {1, 2};
  EXPECT_EQ(Tensor::wrap(local, {2}, DType::f32).raw(), local);
}

TEST_F(TensorTest, WrappedMemoryIsNeverOursToOverwrite) {
  float local[2] = {1, 2};
  EXPECT_FALSE(Tensor::wrap(local, {2}, DType::f32).is_unique());
  auto owner = std::make_shared<std::vector<float>>(counting(6));
  const Tensor kept = Tensor::wrap(owner->data(), {6}, DType::f32, owner);
  EXPECT_FALSE(kept.is_unique());
  owner.reset();  // it may live on elsewhere: the tensor cannot know
  EXPECT_FALSE(kept.is_unique());
  EXPECT_FALSE(Tensor().is_unique());
}

// Its pinned memory went back while the copy was still to be written into it, and then what was on its way to
// the device from there was overwritten.
TEST(HostCopy, OneGivenUpKeepsItsMemoryUntilItIsWritten) {
  const ExecCtx ctx = cuda_devices().count > 0 ? ExecCtx::cuda(0) : ExecCtx::cpu();
  const std::vector<float> ones(1000, 1.0f), twos(1000, 2.0f);
  const Tensor source = Tensor::from(ctx, ones, {1000});
  const Tensor from = Tensor::empty(ctx, {1 << 24}, DType::f32),
               to = Tensor::empty(ctx, {1 << 24}, DType::f32);
  for (int i = 0; i < 4; ++i) ctx.stream->copy(to.raw(), from.raw(), from.nbytes());  // keeps the stream busy
  HostCopy(ctx, source);
  std::vector<Tensor> targets;  // several, as the pool has other memory too
  for (int i = 0; i < 4; ++i) targets.push_back(Tensor::from(ctx, twos, {1000}));
  for (const Tensor& target : targets) EXPECT_EQ(target.to_vector<float>(), twos);
}

TEST(MetaTensor, HasAShapeAndNoValues) {
  const ExecCtx ctx = ExecCtx::meta();
  const Tensor a = Tensor::from(ctx, std::vector<float>{1, 2, 3, 4, 5, 6}, {2, 3});
  EXPECT_TRUE(a.device().is_meta());
  EXPECT_EQ(a.narrow(1, 1, 2).shape(), (Shape{2, 2}));
  EXPECT_EQ(ctx.allocator->stats().used_bytes, 256u);
  const HostCopy copy(ctx, a);  // may be made; what it holds may not be asked for
  const auto refused = [](const auto& read) {
    try {
      read();
      ADD_FAILURE() << "a value was given";
    } catch (const InvalidArgument& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("on the meta device"), std::string::npos) << text;
      EXPECT_NE(text.find("(tensor_test.cpp:"), std::string::npos) << text;
    }
  };
  refused([&] { a.to_vector<float>(); });
  refused([&] { a.to_floats(); });
  refused([&] { a.to_host(); });
  refused([&] {
    float values[6];
    a.copy_to_host(values);
  });
  refused([&] { copy.value<float>(); });
}

}  // namespace
}  // namespace tessera
