/// The CUDA norms against the CPU's.

#include "kernels/api/norm.hpp"

#include <ostream>

#include "tests/kernels/cuda/row_values.hpp"

namespace tessera::kernels {
namespace {

using test::DeviceBuffer;
using test::DeviceStream;
using test::expect_close;
using test::expect_same_bits;
using test::random_values;
using test::Twin;

struct Case {
  std::int64_t rows, cols;
  NormKind kind = NormKind::layer;
  bool branch = true, bias = true;
  float dropout = 0.0f;
  std::size_t offset = 0;  // elements the rows are off alignment
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.rows << "x" << c.cols << (c.kind == NormKind::rms ? " rms" : " layer")
             << (c.branch ? " branch" : "") << (c.bias ? " bias" : "") << " p=" << c.dropout << " offset "
             << c.offset;
}

DropoutSpec spec_of(const Case& c) {
  return {.key = {.seed = 0x123456789abcull, .site = 22, .step = 33},
          .probability = c.dropout,
          .batch = 3,
          .sample0 = 5,
          .position0 = 7,
          .seq_length = 40};
}

/// Every tensor of the three launchers, on both sides.
template <typename R, typename T>
struct Tensors {
  Tensors(const DeviceStream& stream, const Case& c)
      : residual(stream, random_values<R>(c.rows * c.cols, 1, 2.0f, 0.5f), c.offset),
        branch(stream, random_values<T>(c.rows * c.cols, 2), c.offset),
        weight(stream, random_values<float>(c.cols, 3, 0.5f, 1.0f), c.offset),
        bias(stream, random_values<float>(c.cols, 4), c.offset),
        residual_out(stream, random_values<R>(c.rows * c.cols, 10), c.offset),
        y(stream, random_values<T>(c.rows * c.cols, 11), c.offset),
        mean(stream, random_values<float>(c.rows, 12)),
        rstd(stream, random_values<float>(c.rows, 13)),
        dy(stream, random_values<T>(c.rows * c.cols, 5), c.offset),
        dresidual(stream, random_values<R>(c.rows * c.cols, 6), c.offset),
        dresidual_in(stream, random_values<R>(c.rows * c.cols, 14), c.offset),
        dbranch(stream, random_values<T>(c.rows * c.cols, 15), c.offset),
        dweight(stream, random_values<float>(c.cols, 7), c.offset),
        dbias(stream, random_values<float>(c.cols, 8), c.offset),
        scratch(stream, std::vector<float>(static_cast<std::size_t>(kNormGradParts * 2 * c.cols), NAN)) {}

  Twin<R> residual;
  Twin<T> branch;
  Twin<float> weight, bias;
  Twin<R> residual_out;
  Twin<T> y;
  Twin<float> mean, rstd;
  Twin<T> dy;
  Twin<R> dresidual, dresidual_in;
  Twin<T> dbranch;
  Twin<float> dweight, dbias, scratch;
};

/// Pointers of either side.
struct Host {
  template <typename T>
  T* operator()(Twin<T>& twin) const {
    return twin.host.data();
  }
};
struct Device {
  template <typename T>
  T* operator()(Twin<T>& twin) const {
    return twin.device.data();
  }
};

template <typename R, typename T, typename Side>
AddNormForward forward_params(const Case& c, Tensors<R, T>& t, Side at) {
  return {.rows = c.rows,
          .cols = c.cols,
          .kind = c.kind,
          .eps = 1e-3f,
          .residual_dtype = dtype_of<R>::value,
          .dtype = dtype_of<T>::value,
          .residual = at(t.residual),
          .branch = c.branch ? at(t.branch) : nullptr,
          .dropout = spec_of(c),
          .weight = at(t.weight),
          .bias = c.bias ? at(t.bias) : nullptr,
          .residual_out = c.branch ? at(t.residual_out) : nullptr,
          .y = at(t.y),
          .mean = c.kind == NormKind::layer ? at(t.mean) : nullptr,
          .rstd = at(t.rstd)};
}

template <typename R, typename T, typename Side>
AddNormBackward backward_params(const Case& c, Tensors<R, T>& t, Side at) {
  return {.rows = c.rows,
          .cols = c.cols,
          .kind = c.kind,
          .residual_dtype = dtype_of<R>::value,
          .dtype = dtype_of<T>::value,
          .residual_out = at(t.residual),
          .mean = c.kind == NormKind::layer ? at(t.mean) : nullptr,
          .rstd = at(t.rstd),
          .weight = at(t.weight),
          .dy = at(t.dy),
          .dresidual = c.bias ? at(t.dresidual) : nullptr,
          .dresidual_in = at(t.dresidual_in),
          .dbranch = c.branch ? at(t.dbranch) : nullptr,
          .dropout = spec_of(c)};
}

template <typename R, typename T, typename Side>
NormWeightGrad weight_params(const Case& c, Tensors<R, T>& t, Side at) {
  return {.rows = c.rows,
          .cols = c.cols,
          .kind = c.kind,
          .residual_dtype = dtype_of<R>::value,
          .dtype = dtype_of<T>::value,
          .residual_out = at(t.residual),
          .mean = c.kind == NormKind::layer ? at(t.mean) : nullptr,
          .rstd = at(t.rstd),
          .dy = at(t.dy),
          .dweight = at(t.dweight),
          .dbias = c.bias ? at(t.dbias) : nullptr,
          .beta = c.branch ? 1.0f : 0.0f,
          .scratch = at(t.scratch)};
}

template <typename T>
void copy_to_device(const DeviceStream& stream, const Twin<T>& twin) {
  tessera::cuda::copy(twin.device.data(), twin.host.data(), twin.host.size() * sizeof(T), stream.get());
}

template <typename R, typename T>
void compare(const Case& c) {
  SCOPED_TRACE(::testing::Message() << c << " " << dtype_of<R>::value << "/" << dtype_of<T>::value);
  const DeviceStream stream;
  Tensors<R, T> t(stream, c);
  cpu::add_norm_forward(forward_params(c, t, Host{}), {});
  cuda::add_norm_forward(forward_params(c, t, Device{}), stream.launch());
  // One column: (x - mean) / sqrt(eps) is rounding error, 30 times enlarged.
  expect_close(t.residual_out, 3e-7f, "residual_out");
  expect_close(t.mean, 1e-6f, "mean");
  expect_close(t.rstd, 5e-6f, "rstd");
  // A stored sum may fall on the other side of a rounding; what follows from it moves by as much.
  const float moved = c.branch ? 4.0f * test::kSpacing<R> : 0.0f;
  expect_close(t.y, 1e-5f + moved, "y");
  // Both go on from the same statistics.
  copy_to_device(stream, t.mean);
  copy_to_device(stream, t.rstd);
  cpu::add_norm_backward(backward_params(c, t, Host{}), {});
  cuda::add_norm_backward(backward_params(c, t, Device{}), stream.launch());
  expect_close(t.dresidual_in, 3e-5f, "dresidual_in");
  expect_close(t.dbranch, 3e-5f, "dbranch");
  cpu::norm_weight_grad(weight_params(c, t, Host{}), {});
  cuda::norm_weight_grad(weight_params(c, t, Device{}), stream.launch());
  const float sum = 1e-6f * std::sqrt(static_cast<float>(c.rows));
  expect_close(t.dweight, 1e-5f + sum, "dweight");
  expect_close(t.dbias, 1e-5f + sum, "dbias");
}

/// Both gradients in one pass into the tensors of `t`.
template <typename R, typename T>
void one_pass(const DeviceStream& stream, const Case& c, Tensors<R, T>& t) {
  const auto parts = static_cast<std::size_t>(cuda::norm_gradient_parts(c.rows, c.cols));
  const DeviceBuffer<float> scratch(stream,
                                    std::vector<float>(parts * 2 * static_cast<std::size_t>(c.cols), NAN));
  cuda::add_norm_forward(forward_params(c, t, Device{}), stream.launch());  // for the statistics
  AddNormGradients params{backward_params(c, t, Device{}), weight_params(c, t, Device{})};
  params.weight.scratch = scratch.data();
  cuda::add_norm_gradients(params, stream.launch());
  stream.synchronize();
}

template <typename R, typename T>
void compare_one_pass(const Case& c) {
  SCOPED_TRACE(::testing::Message() << c << " " << dtype_of<R>::value << "/" << dtype_of<T>::value);
  const DeviceStream stream;
  Tensors<R, T> apart(stream, c), together(stream, c), again(stream, c);
  cuda::add_norm_forward(forward_params(c, apart, Device{}), stream.launch());
  cuda::add_norm_backward(backward_params(c, apart, Device{}), stream.launch());
  cuda::norm_weight_grad(weight_params(c, apart, Device{}), stream.launch());
  one_pass(stream, c, together);
  // Rows of these widths are a warp's in one kernel and a block's in the other: their sums differ in
  // rounding.
  const float rounding = c.cols > 768 && c.cols <= 1024 ? 1e-5f : 0.0f;
  expect_close(together.dresidual_in.device.host(), apart.dresidual_in.device.host(), rounding,
               "dresidual_in");
  expect_close(together.dbranch.device.host(), apart.dbranch.device.host(), rounding, "dbranch");
  if (rounding == 0.0f) {
    expect_same_bits(together.dresidual_in.device.host(), apart.dresidual_in.device.host(), "dresidual_in");
    expect_same_bits(together.dbranch.device.host(), apart.dbranch.device.host(), "dbranch");
  }
  const float sum = 1e-5f + 1e-6f * std::sqrt(static_cast<float>(c.rows));
  expect_close(together.dweight.device.host(), apart.dweight.device.host(), sum, "dweight");
  expect_close(together.dbias.device.host(), apart.dbias.device.host(), sum, "dbias");
  one_pass(stream, c, again);
  expect_same_bits(again.dweight.device.host(), together.dweight.device.host(), "dweight again");
  expect_same_bits(again.dbias.device.host(), together.dbias.device.host(), "dbias again");
}

TEST(CudaNorm, AgreesWithTheCpuAtAllWidths) {
  SKIP_WITHOUT_CUDA();
  for (const std::int64_t cols : {1, 3, 31, 33, 257, 768, 1600, 4096, 5120}) {
    for (const NormKind kind : {NormKind::layer, NormKind::rms}) {
      const bool layer = kind == NormKind::layer;
      compare<float, float>({7, cols, kind, true, layer, 0.3f});
      compare<float, bfloat16>({7, cols, kind, true, layer, 0.3f});
      compare<bfloat16, bfloat16>({7, cols, kind, !layer, layer});
      if (HasFatalFailure()) return;
    }
  }
}

TEST(CudaNorm, BothGradientsInOnePass) {
  SKIP_WITHOUT_CUDA();
  // By warps, by blocks, in cut packs, misaligned, wider than registers; fewer and more rows than there are
  // blocks.
  for (const std::int64_t cols : {3, 64, 768, 800, 1603, 4096, 12288}) {
    for (const NormKind kind : {NormKind::layer, NormKind::rms}) {
      const bool layer = kind == NormKind::layer;
      compare_one_pass<float, bfloat16>({7, cols, kind, true, layer, 0.3f});
      compare_one_pass<bfloat16, bfloat16>({2, cols, kind, !layer, layer});
      if (HasFatalFailure()) return;
    }
  }
  for (const std::int64_t rows : {0, 1, 4, 300}) {
    compare_one_pass<float, float>({rows, 128, NormKind::layer, true, true, 0.1f});
    compare_one_pass<float16, float16>({rows, 1600, NormKind::rms, false, true});
    compare_one_pass<float, bfloat16>({rows, 64, NormKind::layer, true, true, 0.1f, 1});
  }
}

TEST(CudaNorm, EveryPairOfDtypes) {
  SKIP_WITHOUT_CUDA();
  for (const std::int64_t cols : {30, 64, 1608}) {
    for (const NormKind kind : {NormKind::layer, NormKind::rms}) {
      const Case c{3, cols, kind, true, true, 0.2f};
      compare<float, float>(c);
      compare<float, bfloat16>(c);
      compare<float, float16>(c);
      compare<bfloat16, float>(c);
      compare<bfloat16, bfloat16>(c);
      compare<float16, float>(c);
      compare<float16, float16>(c);
      compare_one_pass<float, float>(c);
      compare_one_pass<bfloat16, float>(c);
      compare_one_pass<float16, float>(c);
      compare_one_pass<float, float16>(c);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(CudaNorm, RowsAndOptions) {
  SKIP_WITHOUT_CUDA();
  for (const std::int64_t rows : {0, 1, 7, 300}) {
    for (const std::int64_t cols : {33, 128}) {
      for (const bool branch : {false, true}) {
        for (const bool bias : {false, true}) {
          compare<float, bfloat16>({rows, cols, NormKind::layer, branch, bias, branch ? 0.1f : 0.0f});
          compare<float, float>({rows, cols, NormKind::rms, branch, bias});
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(CudaNorm, MisalignedRows) {
  SKIP_WITHOUT_CUDA();
  for (const std::int64_t cols : {64, 1600}) {
    for (const std::size_t offset : {1, 2, 4}) {
      compare<float, bfloat16>({5, cols, NormKind::layer, true, true, 0.3f, offset});
      compare<bfloat16, bfloat16>({5, cols, NormKind::rms, true, false, 0.0f, offset});
      if (HasFatalFailure()) return;
    }
  }
}

TEST(CudaNorm, RowsWiderThanTheRegistersOfABlock) {
  SKIP_WITHOUT_CUDA();
  compare<float, bfloat16>({2, 12292, NormKind::layer, true, true, 0.3f});
  compare<float, float>({2, 25003, NormKind::layer, true, true, 0.3f});
  compare<bfloat16, bfloat16>({1, 16384, NormKind::rms, false, false});
}

template <typename R, typename T>
void known_statistics(const Case& c) {
  SCOPED_TRACE(::testing::Message() << c);
  const DeviceStream stream;
  Tensors<R, T> t(stream, c);
  AddNormForward params = forward_params(c, t, Device{});
  cuda::add_norm_forward(params, stream.launch());
  const auto y = t.y.device.host();
  const auto mean = t.mean.device.host(), rstd = t.rstd.device.host();
  copy_to_device(stream, t.y);
  params.known_statistics = true;
  if (c.branch) params.residual = params.residual_out;
  params.branch = nullptr;
  params.residual_out = nullptr;
  cuda::add_norm_forward(params, stream.launch());
  expect_same_bits(t.y.device.host(), y, "y");
  expect_same_bits(t.mean.device.host(), mean, "mean");
  expect_same_bits(t.rstd.device.host(), rstd, "rstd");
}

TEST(CudaNorm, KnownStatisticsGiveTheSameBits) {
  SKIP_WITHOUT_CUDA();
  for (const std::int64_t cols : {3, 257, 768, 1600, 12292}) {
    for (const NormKind kind : {NormKind::layer, NormKind::rms}) {
      for (const bool branch : {false, true}) {
        known_statistics<float, bfloat16>({3, cols, kind, branch, true, 0.2f});
        known_statistics<bfloat16, bfloat16>({3, cols, kind, branch, false});
        known_statistics<float, float>({3, cols, kind, branch, false});
        if (HasFatalFailure()) return;
      }
    }
  }
}

template <typename R, typename T>
void in_place(const Case& c) {
  SCOPED_TRACE(::testing::Message() << c);
  const DeviceStream stream;
  Tensors<R, T> apart(stream, c), same(stream, c);
  cuda::add_norm_forward(forward_params(c, apart, Device{}), stream.launch());
  AddNormForward forward = forward_params(c, same, Device{});
  forward.residual_out = same.residual.device.data();
  cuda::add_norm_forward(forward, stream.launch());
  expect_same_bits(same.residual.device.host(), apart.residual_out.device.host(), "residual_out");
  expect_same_bits(same.y.device.host(), apart.y.device.host(), "y");
  AddNormBackward backward = backward_params(c, apart, Device{});
  backward.residual_out = apart.residual_out.device.data();
  cuda::add_norm_backward(backward, stream.launch());
  backward = backward_params(c, same, Device{});
  backward.dresidual_in = same.dresidual.device.data();
  cuda::add_norm_backward(backward, stream.launch());
  expect_same_bits(same.dresidual.device.host(), apart.dresidual_in.device.host(), "dresidual_in");
  expect_same_bits(same.dbranch.device.host(), apart.dbranch.device.host(), "dbranch");
}

TEST(CudaNorm, WorksInPlace) {
  SKIP_WITHOUT_CUDA();
  for (const std::int64_t cols : {43, 768, 1600, 12292}) {
    in_place<float, bfloat16>({3, cols, NormKind::layer, true, true, 0.2f});
    in_place<bfloat16, bfloat16>({3, cols, NormKind::rms, true, true, 0.2f});
  }
}

TEST(CudaNorm, VarianceSurvivesALargeMean) {
  SKIP_WITHOUT_CUDA();
  for (const std::int64_t cols : {772, 1603}) {
    const Case c{3, cols, NormKind::layer, false, false};
    const DeviceStream stream;
    Tensors<float, float> t(stream, c);
    t.residual.host = random_values<float>(c.rows * c.cols, 9, 0.5f, 1000.0f);
    copy_to_device(stream, t.residual);
    cpu::add_norm_forward(forward_params(c, t, Host{}), {});
    cuda::add_norm_forward(forward_params(c, t, Device{}), stream.launch());
    expect_close(t.rstd, 1e-5f, "rstd");
    expect_close(t.y, 1e-3f, "y");  // the mean is rounded to 6e-5 on either side
  }
}

}  // namespace
}  // namespace tessera::kernels
