#include "kernels/cuda/elementwise.cuh"

#include "kernels/api/elementwise.hpp"
#include "kernels/cuda/philox.cuh"

namespace tessera::kernels::cuda {
namespace {

/// A factor of 0 means that its buffer is not read: 0 * NaN is not 0.
template <typename X, typename Y, bool kReadsX, bool kReadsY>
struct AxpbyOp {
  static constexpr int kUnroll = 2;
  template <int N>
  using Values = TwoPacks<N>;
  float alpha, beta;
  const X* x;
  Y* y;

  template <int N>
  __device__ void load(std::int64_t i, Values<N>& v) const {
    if constexpr (kReadsX) cuda::load(x + i, v.x);
    if constexpr (kReadsY) cuda::load(y + i, v.y);
  }
  template <int N>
  __device__ void store(std::int64_t i, Values<N>& v) const {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      v.x[j] = kReadsX ? alpha * v.x[j] : 0.0f;
      if constexpr (kReadsY) v.x[j] = kReadsX ? v.x[j] + beta * v.y[j] : beta * v.y[j];
    }
    cuda::store(y + i, v.x);
  }
};

template <typename A, typename B, typename Out>
struct AddOp {
  static constexpr int kUnroll = 2;
  template <int N>
  using Values = TwoPacks<N>;
  const A* a;
  const B* b;
  Out* out;

  template <int N>
  __device__ void load(std::int64_t i, Values<N>& v) const {
    cuda::load(a + i, v.x);
    cuda::load(b + i, v.y);
  }
  template <int N>
  __device__ void store(std::int64_t i, Values<N>& v) const {
#pragma unroll
    for (int j = 0; j < N; ++j) v.x[j] += v.y[j];
    cuda::store(out + i, v.x);
  }
};

struct ScaleByOp {
  static constexpr int kUnroll = 4;
  template <int N>
  using Values = PackOf<N>;
  const float* factor;
  float* x;

  template <int N>
  __device__ void load(std::int64_t i, Values<N>& v) const {
    cuda::load(x + i, v.x);
  }
  template <int N>
  __device__ void store(std::int64_t i, Values<N>& v) const {
    const float f = *factor;
#pragma unroll
    for (int j = 0; j < N; ++j) v.x[j] *= f;
    cuda::store(x + i, v.x);
  }
};

/// Packs never cross a row, and begin at a feature that is a multiple of N: one block of random words serves
/// four features.
template <typename T>
struct DropoutOp {
  static constexpr int kUnroll = 2;
  template <int N>
  using Values = PackOf<N>;
  DropoutSpec spec;
  std::uint32_t threshold;
  float scale;
  std::int64_t cols;
  const T* x;
  T* y;

  template <int N>
  __device__ void load(std::int64_t i, Values<N>& v) const {
    cuda::load(x + i, v.x);
  }
  template <int N>
  __device__ void store(std::int64_t i, Values<N>& v) const {
    const RowCol at = row_col(i, cols);
    const std::uint64_t block = spec.first_block(at.row, cols) + static_cast<std::uint64_t>(at.col / 4);
    constexpr int kWords = N < 4 ? N : 4;
#pragma unroll
    for (int j = 0; j < N; j += kWords) {
      const PhiloxBlock words = random_words(spec.key, block + static_cast<std::uint64_t>(j / 4));
#pragma unroll
      for (int k = 0; k < kWords; ++k) {
        const std::uint32_t word = N == 1 ? word_of(words, static_cast<int>(at.col % 4)) : words.word[k];
        v.x[j + k] = word >= threshold ? v.x[j + k] * scale : 0.0f;
      }
    }
    cuda::store(y + i, v.x);
  }
  /// Without an index into registers.
  __device__ static std::uint32_t word_of(const PhiloxBlock& words, int k) {
    const std::uint32_t low = k == 0 ? words.word[0] : words.word[1];
    const std::uint32_t high = k == 2 ? words.word[2] : words.word[3];
    return k < 2 ? low : high;
  }
};

template <typename X, typename Y>
void axpby_of(const Axpby& p, const Launch& where) {
  const X* x = static_cast<const X*>(p.x);
  Y* y = static_cast<Y*>(p.y);
  const bool aligned = is_aligned(x, 16) && is_aligned(y, 16);
  const auto run = [&](const auto& op) {
    aligned ? each_pack<kWidestPack<X, Y>>(op, p.n, where) : each_pack<1>(op, p.n, where);
  };
  if (p.alpha == 0.0f && p.beta == 0.0f) {
    run(AxpbyOp<X, Y, false, false>{p.alpha, p.beta, x, y});
  } else if (p.alpha == 0.0f) {
    run(AxpbyOp<X, Y, false, true>{p.alpha, p.beta, x, y});
  } else if (p.beta == 0.0f) {
    run(AxpbyOp<X, Y, true, false>{p.alpha, p.beta, x, y});
  } else {
    run(AxpbyOp<X, Y, true, true>{p.alpha, p.beta, x, y});
  }
}

template <typename A, typename B, typename Out>
void add_of(const Add& p, const Launch& where) {
  const AddOp<A, B, Out> op{static_cast<const A*>(p.a), static_cast<const B*>(p.b), static_cast<Out*>(p.out)};
  if (is_aligned(op.a, 16) && is_aligned(op.b, 16) && is_aligned(op.out, 16)) {
    each_pack<kWidestPack<A, B, Out>>(op, p.n, where);
  } else {
    each_pack<1>(op, p.n, where);
  }
}

template <typename T>
void dropout_of(const Dropout& p, const Launch& where) {
  const DropoutOp<T> op{p.spec, p.spec.threshold(),         p.spec.scale(),
                        p.cols, static_cast<const T*>(p.x), static_cast<T*>(p.y)};
  const std::int64_t n = p.rows * p.cols;
  const auto fits = [&](int pack) {
    const std::size_t bytes = static_cast<std::size_t>(pack) * sizeof(T);
    return p.cols % pack == 0 && is_aligned(p.x, bytes) && is_aligned(p.y, bytes);
  };
  if (fits(kPack<T>)) {
    each_pack<kPack<T>>(op, n, where);
  } else if (fits(4)) {
    each_pack<4>(op, n, where);
  } else {
    each_pack<1>(op, n, where);
  }
}

}  // namespace

void axpby(const Axpby& params, const Launch& launch) {
  visit_float(params.x_dtype, "axpby x", [&](auto x) {
    visit_float(params.y_dtype, "axpby y",
                [&](auto y) { axpby_of<decltype(x), decltype(y)>(params, launch); });
  });
}

void add(const Add& params, const Launch& launch) {
  visit_float(params.a_dtype, "add a", [&](auto a) {
    visit_float(params.b_dtype, "add b", [&](auto b) {
      visit_float(params.out_dtype, "add out",
                  [&](auto out) { add_of<decltype(a), decltype(b), decltype(out)>(params, launch); });
    });
  });
}

void dropout(const Dropout& params, const Launch& launch) {
  if (!params.spec.active()) {
    const std::size_t bytes = static_cast<std::size_t>(params.rows * params.cols) * size_of(params.dtype);
    if (params.x != params.y && bytes > 0) {
      check(cudaMemcpyAsync(params.y, params.x, bytes, cudaMemcpyDeviceToDevice,
                            static_cast<cudaStream_t>(launch.stream)),
            "cudaMemcpyAsync");
    }
    return;
  }
  visit_float(params.dtype, "dropout", [&](auto t) { dropout_of<decltype(t)>(params, launch); });
}

void scale_by(const ScaleBy& params, const Launch& launch) {
  const ScaleByOp op{params.factor, params.x};
  if (is_aligned(params.x, 16)) {
    each_pack<kPack<float>>(op, params.n, launch);
  } else {
    each_pack<1>(op, params.n, launch);
  }
}

TESSERA_KERNEL_FILE(each_pack_kernel<1, ScaleByOp>);

}  // namespace tessera::kernels::cuda
