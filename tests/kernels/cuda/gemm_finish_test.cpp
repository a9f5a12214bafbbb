/// The pass that follows a product, against its definition in double.

#include "kernels/cuda/gemm_finish.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/kernels/cuda/device_buffer.hpp"
#include "tests/kernels/cuda/random_values.hpp"
#include "tests/kernels/gelu.hpp"

namespace tessera::kernels {
namespace {

using test::DeviceBuffer;
using test::DeviceStream;
using test::kUnit;
using test::random;

double activated(double x, Epilogue kind) {
  if (kind == Epilogue::none) return x;
  return kind == Epilogue::gelu_tanh ? testing::gelu_tanh(x) : testing::gelu_erf(x);
}

/// The hardware's own e^x and quotient are good to 1e-5 and used for 16 bits; what they add to the rounding.
template <typename C>
constexpr double kApproximate = sizeof(C) == 2 ? 3e-5 : 0.0;

template <typename C, typename B>
void check_finish(std::int64_t n, std::int64_t pad, std::size_t offset, Epilogue epilogue, int way) {
  constexpr std::int64_t m = 37;
  const bool biased = (way & 1) != 0, keep = (way & 2) != 0, clear = (way & 4) != 0;
  SCOPED_TRACE(::testing::Message() << n << " pad " << pad << " offset " << offset << " way " << way
                                    << " epilogue " << static_cast<int>(epilogue));
  const std::int64_t ld = n + pad;
  auto c = random<C>(m * ld, 1);
  const auto bias = random<B>(n, 2);
  const std::vector<C> untouched(c.size(), C(77.0f));
  const DeviceStream stream;
  const DeviceBuffer<C> device_c(stream, c, offset), device_pre(stream, untouched, offset);
  const DeviceBuffer<B> device_bias(stream, bias, offset);
  cuda::gemm_finish({.product = device_c.data(),
                     .c = device_c.data(),
                     .bias = biased ? device_bias.data() : nullptr,
                     .pre = keep ? device_pre.data() : nullptr,
                     .m = m,
                     .n = n,
                     .ldc = ld,
                     .c_dtype = dtype_of<C>::value,
                     .bias_dtype = dtype_of<B>::value,
                     .epilogue = epilogue,
                     .clear = clear},
                    stream.launch());
  const auto got = device_c.host(), pre = device_pre.host();
  for (std::size_t i = 0; i < got.size(); ++i) {
    const auto column = static_cast<std::int64_t>(i) % ld;
    double x = clear ? 0.0 : static_cast<double>(static_cast<float>(c[i]));
    if (biased && column < n)
      x += static_cast<double>(static_cast<float>(bias[static_cast<std::size_t>(column)]));
    const bool written = keep && epilogue != Epilogue::none && column < n;
    ASSERT_EQ(static_cast<float>(pre[i]), written ? static_cast<float>(C(static_cast<float>(x))) : 77.0f)
        << i;
    if (column >= n) {
      ASSERT_EQ(static_cast<float>(got[i]), static_cast<float>(c[i])) << "padding " << i;
    } else {
      const double y = activated(x, epilogue);
      const double allowed = 2e-6 + (kUnit<C> + kApproximate<C>)*std::fabs(y);
      ASSERT_NEAR(static_cast<double>(static_cast<float>(got[i])), y, allowed) << i;
    }
  }
}

/// C = x gelu'(pre).
template <typename C>
void check_gradient(std::int64_t n, std::int64_t pad, std::size_t offset, bool tanh, bool clear) {
  constexpr std::int64_t m = 37;
  SCOPED_TRACE(::testing::Message() << n << " pad " << pad << " offset " << offset << " tanh " << tanh
                                    << " clear " << clear);
  const std::int64_t ld = n + pad;
  const auto c = random<C>(m * ld, 1), pre = random<C>(m * ld, 2);
  const DeviceStream stream;
  const DeviceBuffer<C> device_c(stream, c, offset), device_pre(stream, pre, offset);
  cuda::gemm_finish({.product = device_c.data(),
                     .c = device_c.data(),
                     .pre = device_pre.data(),
                     .m = m,
                     .n = n,
                     .ldc = ld,
                     .c_dtype = dtype_of<C>::value,
                     .epilogue = tanh ? Epilogue::dgelu_tanh : Epilogue::dgelu_erf,
                     .clear = clear},
                    stream.launch());
  const auto got = device_c.host(), read = device_pre.host();
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(static_cast<float>(read[i]), static_cast<float>(pre[i])) << i;
    const auto x = static_cast<double>(static_cast<float>(c[i]));
    if (static_cast<std::int64_t>(i) % ld >= n) {
      ASSERT_EQ(static_cast<double>(static_cast<float>(got[i])), x) << "padding " << i;
      continue;
    }
    const auto z = static_cast<double>(static_cast<float>(pre[i]));
    const double slope = tanh ? testing::gelu_tanh_slope(z) : testing::gelu_erf_slope(z);
    const double y = clear ? 0.0 : x * slope;
    const double allowed = 2e-6 + kUnit<C> * std::fabs(y) + kApproximate<C> * std::fabs(x);
    ASSERT_NEAR(static_cast<double>(static_cast<float>(got[i])), y, allowed) << i;
  }
}

TEST(CudaGemmFinish, AddsBiasKeepsPreAndActivates) {
  SKIP_WITHOUT_CUDA();
  for (const Epilogue epilogue : {Epilogue::none, Epilogue::gelu_tanh, Epilogue::gelu_erf}) {
    for (int way = 0; way < 8; ++way) {
      for (const std::int64_t n : {1, 7, 16, 328}) {
        check_finish<float, float>(n, 0, 0, epilogue, way);
        check_finish<float, bfloat16>(n, 3, 1, epilogue, way);
        check_finish<bfloat16, bfloat16>(n, 8, 0, epilogue, way);
        check_finish<float16, float16>(n, 0, n % 2 == 0 ? 1 : 0, epilogue, way);
        check_finish<float, float16>(n, 4, 0, epilogue, way);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(CudaGemmFinish, MultipliesByTheSlope) {
  SKIP_WITHOUT_CUDA();
  for (const bool tanh : {false, true}) {
    for (const bool clear : {false, true}) {
      for (const std::int64_t n : {1, 7, 16, 328}) {
        check_gradient<float>(n, 0, 0, tanh, clear);
        check_gradient<float>(n, 3, 1, tanh, clear);
        check_gradient<bfloat16>(n, 8, 0, tanh, clear);
        check_gradient<float16>(n, 0, n % 2 == 0 ? 1 : 0, tanh, clear);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// The product went to pre: C is written and never read.
TEST(CudaGemmFinish, ActivatesWhatIsElsewhere) {
  SKIP_WITHOUT_CUDA();
  constexpr std::int64_t m = 5, n = 24;
  const auto product = random<bfloat16>(m * n, 1);
  const DeviceStream stream;
  const DeviceBuffer<bfloat16> pre(stream, product),
      c(stream, std::vector<bfloat16>(m * n, bfloat16(std::nanf(""))));
  cuda::gemm_finish({.product = pre.data(),
                     .c = c.data(),
                     .m = m,
                     .n = n,
                     .ldc = n,
                     .c_dtype = DType::bf16,
                     .epilogue = Epilogue::gelu_tanh},
                    stream.launch());
  const auto got = c.host();
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double y = testing::gelu_tanh(static_cast<double>(static_cast<float>(product[i])));
    ASSERT_NEAR(static_cast<double>(static_cast<float>(got[i])), y,
                2e-6 + (kUnit<bfloat16> + kApproximate<bfloat16>)*std::fabs(y));
  }
}

}  // namespace
}  // namespace tessera::kernels
