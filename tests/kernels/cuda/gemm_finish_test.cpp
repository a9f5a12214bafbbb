/// The pass that follows a product, against its definition in double.

#include "kernels/cuda/gemm_finish.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/kernels/cuda/device_buffer.hpp"
#include "tests/kernels/cuda/random_values.hpp"

namespace tessera::kernels {
namespace {

using test::DeviceBuffer;
using test::DeviceStream;
using test::kUnit;
using test::random;

double activated(double x, Epilogue kind) {
  if (kind == Epilogue::gelu_erf) return 0.5 * x * (1.0 + std::erf(x / std::sqrt(2.0)));
  if (kind == Epilogue::none) return x;
  return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
}

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
  cuda::gemm_finish({.c = device_c.data(),
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
      ASSERT_NEAR(static_cast<double>(static_cast<float>(got[i])), y, 1e-6 + kUnit<C> * std::fabs(y)) << i;
    }
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

}  // namespace
}  // namespace tessera::kernels
