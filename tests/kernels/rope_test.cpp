#include "kernels/api/rope.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <tuple>
#include <vector>

namespace tessera::kernels {
namespace {

struct Sizes {
  std::int64_t rows, heads, head_dim, rotary_dim;
};

constexpr std::int64_t kPositions = 50;

template <typename T>
class RopeProblem {
 public:
  RopeProblem(const Sizes& sizes, bool interleaved) {
    const std::int64_t pairs = sizes.rotary_dim / 2;
    for (std::int64_t position = 0; position < kPositions; ++position) {
      for (std::int64_t i = 0; i < pairs; ++i) {
        const double angle = static_cast<double>(position) * std::pow(10000.0, -2.0 * i / sizes.rotary_dim);
        cos_.push_back(static_cast<float>(std::cos(angle)));
        sin_.push_back(static_cast<float>(std::sin(angle)));
      }
    }
    std::mt19937 engine(7);
    std::uniform_real_distribution<float> next(-1.0f, 1.0f);
    const std::int64_t stride = sizes.heads * sizes.head_dim + 3;  // a gap that must stay as it is
    for (std::int64_t i = 0; i < sizes.rows * stride; ++i) x.push_back(static_cast<T>(next(engine)));
    for (std::int64_t row = 0; row < sizes.rows; ++row)
      positions_.push_back(static_cast<std::int32_t>(row * 7 % kPositions));
    call_ = {sizes.rows, sizes.heads,       sizes.head_dim, sizes.rotary_dim, dtype_of<T>::value, nullptr,
             stride,     positions_.data(), cos_.data(),    sin_.data(),      interleaved,        false};
  }
  RopeProblem(const RopeProblem&) = delete;

  std::vector<T> rotated(std::vector<T> values, bool inverse, int threads) const {
    Rope call = call_;
    call.x = values.data();
    call.inverse = inverse;
    cpu::rope(call, {nullptr, threads});
    return values;
  }

  /// Complex multiplication by e^(i angle), pair by pair, in double precision.
  std::vector<double> expected(bool inverse) const {
    std::vector<double> out(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) out[i] = static_cast<float>(x[i]);
    const std::int64_t pairs = call_.rotary_dim / 2;
    for (std::int64_t row = 0; row < call_.rows; ++row) {
      for (std::int64_t head = 0; head < call_.heads; ++head) {
        const std::int64_t base = row * call_.row_stride + head * call_.head_dim;
        for (std::int64_t i = 0; i < pairs; ++i) {
          const auto first = static_cast<std::size_t>(base + (call_.interleaved ? 2 * i : i));
          const auto second = static_cast<std::size_t>(base + (call_.interleaved ? 2 * i + 1 : i + pairs));
          const auto angle = static_cast<std::size_t>(positions_[static_cast<std::size_t>(row)] * pairs + i);
          const double c = cos_[angle], s = inverse ? -sin_[angle] : sin_[angle], a = out[first],
                       b = out[second];
          out[first] = a * c - b * s;
          out[second] = b * c + a * s;
        }
      }
    }
    return out;
  }

  std::vector<T> x;

 private:
  std::vector<std::int32_t> positions_;
  std::vector<float> cos_, sin_;
  Rope call_;
};

class RopeTest : public testing::TestWithParam<std::tuple<Sizes, bool>> {
 protected:
  template <typename T>
  void check(double tolerance) const {
    const auto& [sizes, interleaved] = GetParam();
    const RopeProblem<T> problem(sizes, interleaved);
    for (const bool inverse : {false, true}) {
      const std::vector<T> out = problem.rotated(problem.x, inverse, 1);
      const std::vector<double> expected = problem.expected(inverse);
      for (std::size_t i = 0; i < out.size(); ++i) {
        ASSERT_NEAR(static_cast<float>(out[i]), expected[i], tolerance)
            << "element " << i << (inverse ? " inverse" : "");
      }
      const std::vector<T> two = problem.rotated(problem.x, inverse, 2);
      EXPECT_EQ(std::memcmp(out.data(), two.data(), out.size() * sizeof(T)), 0) << "2 threads";
    }
    const std::vector<T> back = problem.rotated(problem.rotated(problem.x, false, 1), true, 1);
    for (std::size_t i = 0; i < back.size(); ++i) {
      ASSERT_NEAR(static_cast<float>(back[i]), static_cast<float>(problem.x[i]), 2 * tolerance)
          << "element " << i;
    }
  }
};

TEST_P(RopeTest, Float32) { check<float>(3e-7); }
TEST_P(RopeTest, Bfloat16) { check<bfloat16>(6e-3); }
TEST_P(RopeTest, Float16) { check<float16>(8e-4); }

INSTANTIATE_TEST_SUITE_P(Sizes, RopeTest,
                         testing::Combine(testing::Values(Sizes{1, 1, 2, 2}, Sizes{17, 5, 12, 12},
                                                          Sizes{67, 3, 40, 26}, Sizes{129, 12, 64, 64},
                                                          Sizes{5, 2, 128, 128}, Sizes{3, 7, 80, 20}),
                                          testing::Bool()));

}  // namespace
}  // namespace tessera::kernels
