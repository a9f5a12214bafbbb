#pragma once
/// One suite for every kind of communicator. A kind joins with a line in its own test file:
///   INSTANTIATE_TEST_SUITE_P(Gloo, Conformance, testing::Values(Backend{...}), backend_name);
/// and one more for ConformanceFaults. The tests themselves are in conformance*_test.cpp.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.hpp"
#include "tests/support/errors.hpp"
#include "tests/support/ranks.hpp"

namespace tessera::test {

struct Backend {
  std::string name;
  int max_ranks = 5;
  /// Runs the function on so many ranks, as threads of this process; the first exception is thrown again.
  std::function<void(int, const CommOptions&, const RankFunction&)> run;
  /// Sums are made in rank order and rounded once, a maximum with a NaN is NaN.
  bool rank_order = true;
  /// Messages find their receive by tag, not only in the order of the sender.
  bool tags = true;
  /// Why it cannot run here.
  std::string why_not = {};
};

/// What the ranks' tensors are on; `run` of a backend sets it for its threads.
inline thread_local std::function<ExecCtx()> context = [] { return ExecCtx::cpu(1, 1); };

/// Waits until the operation has ended, so that errors show: on CUDA a wait only orders the stream.
inline void finish(const Pending& pending, const ExecCtx& ctx) {
  pending.wait(ctx);
  ctx.stream->synchronize();
  pending.wait(ctx);
}

inline std::string backend_name(const testing::TestParamInfo<Backend>& info) { return info.param.name; }
inline void PrintTo(const Backend& backend, std::ostream* out) { *out << backend.name; }

class Conformance : public testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    if (!GetParam().why_not.empty()) GTEST_SKIP() << GetParam().why_not;
  }
  /// On every number of ranks from `least` to `most` that the backend allows.
  void on_each_size(int least, int most, const RankFunction& function,
                    const CommOptions& options = {.timeout_s = 60}) const {
    for (int size = least; size <= std::min(most, GetParam().max_ranks); ++size) {
      SCOPED_TRACE(std::to_string(size) + " ranks");
      GetParam().run(size, options, function);
    }
  }
};

/// Deadlines, mismatches, aborts.
class ConformanceFaults : public Conformance {};

inline const std::vector<DType>& all_dtypes() {
  static const std::vector<DType> dtypes{DType::f32, DType::bf16, DType::f16, DType::f64,
                                         DType::i32, DType::i64,  DType::u32, DType::u16,
                                         DType::i16, DType::i8,   DType::u8};
  return dtypes;
}

inline const std::vector<DType>& reducible_dtypes() {
  static const std::vector<DType> dtypes{DType::f32, DType::bf16, DType::f16,
                                         DType::f64, DType::i32,  DType::i64};
  return dtypes;
}

/// `value` to nearest even with so many bits behind the leading one, and 2^least the smallest normal number.
inline double round_to_bits(double value, int bits, int least) {
  if (value == 0.0) return value;
  const double quantum = std::ldexp(1.0, std::max(std::ilogb(value), least) - bits);
  return std::nearbyint(value / quantum) * quantum;
}

/// What an exact value becomes in a dtype; integers are taken as they are.
inline double rounded(double value, DType dtype) {
  switch (dtype) {
    case DType::f32:
      return round_to_bits(value, 23, -126);
    case DType::bf16:
      return round_to_bits(value, 7, -126);
    case DType::f16:
      return round_to_bits(value, 10, -14);
    default:
      return value;
  }
}

/// Half precision, by the definition of the format. The value is one that the format holds.
inline std::uint16_t half_bits(double value) {
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::abs(value);
  if (magnitude < 0x1p-14) return static_cast<std::uint16_t>(sign | static_cast<int>(magnitude * 0x1p24));
  const int exponent = std::ilogb(magnitude);
  const int fraction = static_cast<int>((std::ldexp(magnitude, -exponent) - 1.0) * 1024.0);
  return static_cast<std::uint16_t>(sign | ((exponent + 15) << 10) | fraction);
}

inline double half_value(std::uint16_t bits) {
  const double sign = (bits & 0x8000) ? -1.0 : 1.0;
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent == 31) return fraction ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

template <typename Visit>
void visit_elements(const Tensor& tensor, Visit&& visit) {
  const auto each = [&](auto* data) {
    for (std::int64_t i = 0; i < tensor.numel(); ++i) visit(static_cast<std::size_t>(i), data[i]);
  };
  switch (tensor.dtype()) {
    case DType::f32:
      return each(tensor.data<float>());
    case DType::f64:
      return each(tensor.data<double>());
    case DType::bf16:
      return each(tensor.data<bfloat16>());
    case DType::i32:
      return each(tensor.data<std::int32_t>());
    case DType::i64:
      return each(tensor.data<std::int64_t>());
    case DType::u32:
      return each(tensor.data<std::uint32_t>());
    case DType::u16:
      return each(tensor.data<std::uint16_t>());
    case DType::i16:
      return each(tensor.data<std::int16_t>());
    case DType::i8:
      return each(tensor.data<std::int8_t>());
    case DType::u8:
      return each(tensor.data<std::uint8_t>());
    case DType::f16:
      return each(static_cast<std::uint16_t*>(tensor.raw()));
  }
}

/// Sets values that the dtype holds exactly.
inline void write_values(const Tensor& target, const std::vector<double>& values) {
  ASSERT_EQ(static_cast<std::int64_t>(values.size()), target.numel());
  const Tensor tensor = Tensor::empty(ExecCtx::cpu(1), target.shape(), target.dtype());
  const bool half = tensor.dtype() == DType::f16;
  visit_elements(tensor, [&](std::size_t i, auto& element) {
    using T = std::remove_reference_t<decltype(element)>;
    if constexpr (std::is_same_v<T, bfloat16>) {
      element = bfloat16(static_cast<float>(values[i]));
    } else {
      element = half ? static_cast<T>(half_bits(values[i])) : static_cast<T>(values[i]);
    }
  });
  target.copy_from_host(tensor.raw());
}

inline std::vector<double> read_values(const Tensor& source) {
  const Tensor tensor = Tensor::empty(ExecCtx::cpu(1), source.shape(), source.dtype());
  source.copy_to_host(tensor.raw());
  std::vector<double> values(static_cast<std::size_t>(tensor.numel()));
  visit_elements(tensor, [&](std::size_t i, auto& element) {
    using T = std::remove_reference_t<decltype(element)>;
    if constexpr (std::is_same_v<T, bfloat16>) {
      values[i] = static_cast<float>(element);
    } else {
      values[i] = tensor.dtype() == DType::f16 ? half_value(static_cast<std::uint16_t>(element))
                                               : static_cast<double>(element);
    }
  });
  return values;
}

inline Tensor tensor_of(const ExecCtx& ctx, DType dtype, const std::vector<double>& values) {
  const Tensor tensor = Tensor::empty(ctx, {static_cast<std::int64_t>(values.size())}, dtype);
  write_values(tensor, values);
  return tensor;
}

/// Small whole numbers that tell rank and place apart and that every dtype holds: [0, 60).
inline double mark(int rank, std::int64_t index) { return static_cast<double>((rank * 17 + index * 7) % 60); }

inline std::vector<double> marks(int rank, std::int64_t begin, std::int64_t count) {
  std::vector<double> values;
  for (std::int64_t i = begin; i < begin + count; ++i) values.push_back(mark(rank, i));
  return values;
}

using Counts = std::vector<std::int64_t>;

inline const Counts kLengths{0, 1, 2, 7, 64, 4099};

/// Blocks of 0, 3, 1, 4, 2, ... elements: uneven, the first one empty.
inline Counts uneven(int size, int shift = 0) {
  Counts counts;
  for (int r = 0; r < size; ++r) counts.push_back((r * 3 + shift) % 5);
  return counts;
}

/// Elements of the first `end` blocks.
inline std::int64_t sum_of(const Counts& counts, int end) {
  std::int64_t sum = 0;
  for (int r = 0; r < end; ++r) sum += counts[static_cast<std::size_t>(r)];
  return sum;
}

/// Sum or maximum over ranks of mark(rank, i).
inline std::vector<double> reduced_marks(int size, ReduceOp op, std::int64_t begin, std::int64_t count,
                                         DType dtype) {
  std::vector<double> values;
  for (std::int64_t i = begin; i < begin + count; ++i) {
    double value = mark(0, i);
    for (int r = 1; r < size; ++r) {
      value = op == ReduceOp::sum ? value + mark(r, i) : std::max(value, mark(r, i));
    }
    values.push_back(rounded(value, dtype));
  }
  return values;
}

}  // namespace tessera::test
