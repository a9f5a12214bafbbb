#include "tessera/base/shape.hpp"

#include <gtest/gtest.h>

#include <sstream>
#include <vector>

namespace tessera {
namespace {

TEST(Shape, SizesAndStrides) {
  const Shape shape{2, 3, 5};
  EXPECT_EQ(shape.rank(), 3);
  EXPECT_EQ(shape[0], 2);
  EXPECT_EQ(shape[-1], 5);
  EXPECT_EQ(shape[-3], 2);
  EXPECT_EQ(shape.numel(), 30);
  EXPECT_EQ(shape.contiguous_strides(), (Shape{15, 5, 1}));
  EXPECT_EQ(std::vector<std::int64_t>(shape.dims().begin(), shape.dims().end()),
            (std::vector<std::int64_t>{2, 3, 5}));
}

TEST(Shape, EdgeCases) {
  const Shape scalar;
  EXPECT_EQ(scalar.rank(), 0);
  EXPECT_EQ(scalar.numel(), 1);
  EXPECT_TRUE(scalar.dims().empty());
  EXPECT_EQ(scalar, Shape{});
  EXPECT_EQ((Shape{3, 0, 2}).numel(), 0);
  EXPECT_EQ((Shape{1, 2, 3, 4, 5, 6}).rank(), Shape::kMaxRank);
  EXPECT_EQ((Shape{1LL << 31, 1LL << 31}).numel(), 1LL << 62);
}

TEST(Shape, Comparison) {
  EXPECT_EQ((Shape{2, 3}), (Shape{2, 3}));
  EXPECT_NE((Shape{2, 3}), (Shape{3, 2}));
  EXPECT_NE((Shape{2}), (Shape{2, 1}));
  // A dimension beyond the rank must not count.
  Shape longer{2, 3, 7};
  EXPECT_NE(longer, (Shape{2, 3}));
}

TEST(Shape, Refusals) {
  EXPECT_THROW((Shape{1, 2, 3, 4, 5, 6, 7}), InvalidArgument);
  EXPECT_THROW((Shape{2, -1}), InvalidArgument);
  EXPECT_THROW((Shape{2, 3}[2]), InvalidArgument);
  EXPECT_THROW((Shape{2, 3}[-3]), InvalidArgument);
  EXPECT_THROW(Shape{}[0], InvalidArgument);
}

TEST(Shape, PrintsAndIsWritable) {
  Shape shape{2, 3};
  shape[-1] = 9;
  std::ostringstream text;
  text << shape << Shape{};
  EXPECT_EQ(text.str(), "[2, 9][]");
}

}  // namespace
}  // namespace tessera
