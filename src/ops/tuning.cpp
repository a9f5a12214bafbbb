#include "tessera/ops/tuning.hpp"

#include <map>

#include "kernels/api/backends.hpp"
#include "kernels/cuda/gemm_plan.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera::ops {
namespace {

using kernels::Gemm;
namespace gemm_plan = kernels::cuda;

std::string key_of(const Gemm& g) {
  return gemm_plan::key_of(gemm_plan::product_of(g, gemm_plan::choose_fused(g))).text();
}

std::string shape_of(const Gemm& g) {
  return tessera::detail::concat(g.m, " x ", g.n, " x ", g.k, g.trans_a ? ", A transposed" : "",
                                 g.trans_b ? ", B transposed" : "");
}

std::string fused_of(const Gemm& g) {
  std::string text = g.beta != 0.0f ? "+=" : "";
  const auto add = [&text](const char* word) { text += (text.empty() ? "" : ", ") + std::string(word); };
  if (g.bias != nullptr) add("bias");
  if (g.epilogue != kernels::Epilogue::none) add(is_gradient(g.epilogue) ? "gelu's gradient" : "gelu");
  if (g.pre != nullptr && !is_gradient(g.epilogue)) add("its input");
  if (g.column_sums != nullptr) add("column sums");
  return text;
}

RecordedProduct record(const Work& work, const Gemm& g) {
  const std::string from(name_of(g.ab_dtype)), to(name_of(g.c_dtype));
  return {.key = key_of(g),
          .shape = shape_of(g),
          .dtypes = from == to ? from : from + " into " + to,
          .fused = fused_of(g),
          .flops = work.flops,
          .gemm = work.product};
}

/// Memory with normal values that begins at an address of the same alignment as `like`.
class Operand {
 public:
  Operand(const ExecCtx& ctx, const void* like, DType dtype, std::int64_t elements, std::uint32_t site) {
    if (like == nullptr) return;
    const auto bytes = static_cast<std::int64_t>(size_of(dtype));
    const std::int64_t alignment = gemm_plan::detail::alignment(like), shift = alignment % 16 / bytes;
    values_ = Tensor::empty(ctx, {elements + shift}, dtype);
    for (std::int64_t begin = 0; begin < values_.numel(); begin += kChunk) {
      const Tensor part = values_.narrow(0, begin, std::min(kChunk, values_.numel() - begin));
      const Tensor random = Tensor::empty(ctx, part.shape(), DType::f32);
      fill_normal(ctx, random, 1.0f, RngKey{.site = site}, {.row0 = begin});
      axpby(ctx, 1.0f, random, 0.0f, part);
    }
    data_ = static_cast<char*>(values_.raw()) + shift * bytes;
  }
  void* data() const { return data_; }

 private:
  static constexpr std::int64_t kChunk = std::int64_t{1} << 24;
  Tensor values_;
  void* data_ = nullptr;
};

}  // namespace

std::vector<RecordedProduct> recorded_products(std::span<const TraceLane> lanes) {
  std::vector<RecordedProduct> products;
  std::map<std::string, std::size_t> seen;
  for (const TraceLane& lane : lanes) {
    for (const TimedWork& timed : lane.work) {
      const Gemm* const gemm = timed.work.product.get();
      if (gemm == nullptr || gemm->k == 0) continue;
      RecordedProduct product = record(timed.work, *gemm);
      const auto [slot, fresh] = seen.emplace(product.key, products.size());
      if (fresh) products.push_back(std::move(product));
      ++products[slot->second].count;
    }
  }
  return products;
}

ProductTrial tune_product(const ExecCtx& ctx, const RecordedProduct& product) {
  Gemm g = *product.gemm;
  const auto rows_of = [](bool transposed, std::int64_t rows, std::int64_t cols) {
    return transposed ? cols : rows;
  };
  const Operand a(ctx, g.a, g.ab_dtype, rows_of(g.trans_a, g.m, g.k) * g.lda, 1),
      b(ctx, g.b, g.ab_dtype, rows_of(g.trans_b, g.k, g.n) * g.ldb, 2),
      c(ctx, g.c, g.c_dtype, g.m * g.ldc, 3), bias(ctx, g.bias, g.ab_dtype, g.n, 4),
      pre(ctx, g.pre, g.c_dtype, g.m * g.ldc, 5), sums(ctx, g.column_sums, DType::f32, g.m, 6),
      scratch(ctx, g.sums_scratch, DType::f32, kernels::kReduceParts * g.m, 7);
  g.a = a.data(), g.b = b.data(), g.c = c.data(), g.bias = bias.data(), g.pre = pre.data();
  g.column_sums = static_cast<float*>(sums.data()), g.sums_scratch = static_cast<float*>(scratch.data());
  ctx.stream->make_current();
  const kernels::GemmTrial trial =
      kernels::cuda::tune_gemm(g, {.stream = ctx.stream->native(), .gemm_tuner = ctx.gemm_tuner.get()});
  return {trial.known, trial.candidates, trial.first_s, trial.best_s, trial.separate};
}

}  // namespace tessera::ops
