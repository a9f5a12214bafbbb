/// The CUDA kernels that live on memory bandwidth, beside the bandwidth of a copy on the same GPU. Bytes are
/// those a kernel cannot do without: every operand once. Usage: cuda_memory_bench

#include <cstdio>
#include <string>

#include "kernels/api/activation.hpp"
#include "kernels/api/cross_entropy.hpp"
#include "kernels/api/elementwise.hpp"
#include "kernels/api/embedding.hpp"
#include "kernels/api/norm.hpp"
#include "kernels/api/optimizer.hpp"
#include "kernels/api/reduce.hpp"
#include "kernels/api/rope.hpp"
#include "tests/bench/cuda_bench.hpp"

namespace tessera {
namespace {

namespace k = kernels::cuda;
using bench::Gpu;
using bench::Indices;
using bench::Memory;
using bench::Random;
using bench::Report;
using std::int64_t;

constexpr double kBf16 = 2.0;

struct Sizes {
  const char* name;
  int64_t rows, width, head_dim, vocab, parameters;
};
constexpr Sizes kSizes[] = {{"16384 x 4096", 16384, 4096, 128, 32000, int64_t{16384} * 4096},
                            {"GPT-2 124M, 8192 x 768", 8192, 768, 64, 50304, 124475904}};

void run_elementwise(const Report& report, const Sizes& s) {
  const Gpu& gpu = report.gpu();
  const int64_t n = s.rows * s.width;
  const double bytes = kBf16 * static_cast<double>(n);
  const Random a(gpu, DType::bf16, 2 * n), b(gpu, DType::bf16, n), c(gpu, DType::bf16, 2 * n);
  const Random floats(gpu, DType::f32, n);
  constexpr DType kType = DType::bf16;
  report.row("axpby", 3 * bytes, [&] {
    k::axpby({.n = n, .beta = 0.5f, .x_dtype = kType, .y_dtype = kType, .x = a.data(), .y = b.data()},
             gpu.launch());
  });
  report.row("axpby float32 to bfloat16", 3 * bytes,
             [&] { k::axpby({.n = n, .y_dtype = kType, .x = floats.data(), .y = b.data()}, gpu.launch()); });
  report.row("add", 3 * bytes, [&] {
    k::add({.n = n,
            .a_dtype = kType,
            .b_dtype = kType,
            .out_dtype = kType,
            .a = a.data(),
            .b = b.data(),
            .out = c.data()},
           gpu.launch());
  });
  report.row("dropout", 2 * bytes, [&] {
    k::dropout({.rows = s.rows,
                .cols = s.width,
                .dtype = kType,
                .x = a.data(),
                .y = c.data(),
                .spec = {.key = {.seed = 1}, .probability = 0.1f, .seq_length = s.rows}},
               gpu.launch());
  });
  report.row("gelu forward", 2 * bytes, [&] {
    k::activation_forward({.n = n, .dtype = kType, .x = a.data(), .y = c.data()}, gpu.launch());
  });
  report.row("gelu backward", 3 * bytes, [&] {
    k::activation_backward({.n = n, .dtype = kType, .x = a.data(), .dy = b.data(), .dx = c.data()},
                           gpu.launch());
  });
  report.row("swiglu forward", 3 * bytes, [&] {
    k::swiglu_forward({.rows = s.rows, .width = s.width, .dtype = kType, .gate_up = a.data(), .y = b.data()},
                      gpu.launch());
  });
  report.row("swiglu backward", 5 * bytes, [&] {
    k::swiglu_backward({.rows = s.rows,
                        .width = s.width,
                        .dtype = kType,
                        .gate_up = a.data(),
                        .dy = b.data(),
                        .dgate_up = c.data()},
                       gpu.launch());
  });
  report.row("copy, outer dimensions exchanged", 2 * bytes, [&] {
    k::copy_strided({.size = {1, 8, s.rows / 8, s.width},
                     .src_stride = {0, s.rows / 8 * s.width, s.width, 1},
                     .dst_stride = {0, s.width, 8 * s.width, 1},
                     .dtype = kType,
                     .src = a.data(),
                     .dst = c.data()},
                    gpu.launch());
  });
  report.row("transposition", 2 * bytes, [&] {
    k::copy_strided({.size = {1, 1, s.rows, s.width},
                     .src_stride = {0, 0, s.width, 1},
                     .dst_stride = {0, 0, 1, s.rows},
                     .dtype = kType,
                     .src = a.data(),
                     .dst = c.data()},
                    gpu.launch());
  });
  report.row("fill zero", bytes, [&] { k::fill_zero({.bytes = 2 * n, .x = c.data()}, gpu.launch()); });
}

void run_rope(const Report& report, const Sizes& s) {
  const Gpu& gpu = report.gpu();
  const Random x(gpu, DType::bf16, s.rows * s.width), angles(gpu, DType::f32, s.rows * s.head_dim);
  const Indices positions(gpu, s.rows, s.rows);
  report.row("rope", 2 * kBf16 * static_cast<double>(s.rows * s.width), [&] {
    k::rope({.rows = s.rows,
             .heads = s.width / s.head_dim,
             .head_dim = s.head_dim,
             .rotary_dim = s.head_dim,
             .dtype = DType::bf16,
             .x = x.data(),
             .row_stride = s.width,
             .positions = positions.ints(),
             .cos = angles.floats(),
             .sin = angles.floats() + s.rows * s.head_dim / 2},
            gpu.launch());
  });
}

void run_norm(const Report& report, const Sizes& s, kernels::NormKind kind) {
  const Gpu& gpu = report.gpu();
  const int64_t n = s.rows * s.width;
  const double bytes = kBf16 * static_cast<double>(n);
  const Random residual(gpu, DType::bf16, n), branch(gpu, DType::bf16, n), out(gpu, DType::bf16, n),
      y(gpu, DType::bf16, n), upstream(gpu, DType::bf16, n), weight(gpu, DType::f32, s.width),
      bias(gpu, DType::f32, s.width), statistics(gpu, DType::f32, 2 * s.rows),
      dweight(gpu, DType::f32, 2 * s.width),
      scratch(gpu, DType::f32, 2 * int64_t{k::norm_gradient_parts(s.rows, s.width)} * s.width);
  const bool layer = kind == kernels::NormKind::layer;
  const std::string name = layer ? "layer norm" : "rms norm";
  float* mean = layer ? statistics.floats() : nullptr;
  float* rstd = statistics.floats() + s.rows;
  report.row(name + " forward", 4 * bytes, [&] {
    k::add_norm_forward({.rows = s.rows,
                         .cols = s.width,
                         .kind = kind,
                         .residual_dtype = DType::bf16,
                         .dtype = DType::bf16,
                         .residual = residual.data(),
                         .branch = branch.data(),
                         .dropout = {},
                         .weight = weight.floats(),
                         .bias = layer ? bias.floats() : nullptr,
                         .residual_out = out.data(),
                         .y = y.data(),
                         .mean = mean,
                         .rstd = rstd},
                        gpu.launch());
  });
  const kernels::AddNormBackward backward{.rows = s.rows,
                                          .cols = s.width,
                                          .kind = kind,
                                          .residual_dtype = DType::bf16,
                                          .dtype = DType::bf16,
                                          .residual_out = out.data(),
                                          .mean = mean,
                                          .rstd = rstd,
                                          .weight = weight.floats(),
                                          .dy = y.data(),
                                          .dresidual = upstream.data(),
                                          .dresidual_in = upstream.data(),
                                          .dropout = {}};
  const kernels::NormWeightGrad sums{.rows = s.rows,
                                     .cols = s.width,
                                     .kind = kind,
                                     .residual_dtype = DType::bf16,
                                     .dtype = DType::bf16,
                                     .residual_out = out.data(),
                                     .mean = mean,
                                     .rstd = rstd,
                                     .dy = y.data(),
                                     .dweight = dweight.floats(),
                                     .dbias = layer ? dweight.floats() + s.width : nullptr,
                                     .beta = 1.0f,
                                     .scratch = scratch.floats()};
  report.row(name + " backward", 4 * bytes, [&] { k::add_norm_backward(backward, gpu.launch()); });
  report.row(name + " weight gradient", 2 * bytes, [&] { k::norm_weight_grad(sums, gpu.launch()); });
  report.row(name + " backward, both", 4 * bytes, [&] {
    k::add_norm_gradients({backward, sums}, gpu.launch());
  });
}

void run_cross_entropy(const Report& report, const Sizes& s) {
  const Gpu& gpu = report.gpu();
  const double bytes = kBf16 * static_cast<double>(s.rows * s.vocab);
  const Random logits(gpu, DType::bf16, s.rows * s.vocab), loss(gpu, DType::f32, 3 * s.rows);
  const Indices labels(gpu, s.rows, s.vocab);
  float* lse = loss.floats() + s.rows;
  report.row("cross-entropy forward", bytes, [&] {
    k::cross_entropy_forward({.rows = s.rows,
                              .cols = s.vocab,
                              .ld = s.vocab,
                              .dtype = DType::bf16,
                              .logits = logits.data(),
                              .labels = labels.ints(),
                              .loss = loss.floats(),
                              .lse = lse},
                             gpu.launch());
  });
  report.row("cross-entropy backward", 2 * bytes, [&] {
    k::cross_entropy_backward({.rows = s.rows,
                               .cols = s.vocab,
                               .ld = s.vocab,
                               .dtype = DType::bf16,
                               .logits = logits.data(),
                               .labels = labels.ints(),
                               .lse = lse,
                               .upstream = lse + s.rows},
                              gpu.launch());
  });
}

void run_embedding(const Report& report, const Sizes& s) {
  const Gpu& gpu = report.gpu();
  const double elements = static_cast<double>(s.rows * s.width);
  const Random table(gpu, DType::bf16, s.vocab * s.width), y(gpu, DType::bf16, s.rows * s.width),
      dtable(gpu, DType::f32, s.vocab * s.width);
  const Indices tokens(gpu, s.rows, s.vocab);
  report.row("embedding forward", 2 * kBf16 * elements, [&] {
    k::embedding_forward({.rows = s.rows,
                          .cols = s.width,
                          .table_dtype = DType::bf16,
                          .y_dtype = DType::bf16,
                          .tokens = tokens.ints(),
                          .table = table.data(),
                          .vocab_size = s.vocab,
                          .y = y.data(),
                          .dropout = {}},
                         gpu.launch());
  });
  report.row("embedding backward", (kBf16 + 8.0) * elements, [&] {
    k::embedding_backward({.rows = s.rows,
                           .cols = s.width,
                           .dy_dtype = DType::bf16,
                           .dy = y.data(),
                           .index = tokens.ints(),
                           .count = s.vocab,
                           .dtable = dtable.floats(),
                           .beta = 1.0f,
                           .dropout = {}},
                          gpu.launch());
  });
}

void run_reductions(const Report& report, const Sizes& s) {
  const Gpu& gpu = report.gpu();
  const Random x(gpu, DType::bf16, s.rows * s.width), out(gpu, DType::f32, s.width),
      scratch(gpu, DType::f32, kernels::kReduceParts * s.width), grad(gpu, DType::f32, s.parameters);
  const Memory sums(8 * (kernels::kSumParts + 1));
  report.row("column sum", kBf16 * static_cast<double>(s.rows * s.width), [&] {
    k::column_sum({.rows = s.rows,
                   .cols = s.width,
                   .ld = s.width,
                   .dtype = DType::bf16,
                   .x = x.data(),
                   .out = out.floats(),
                   .beta = 1.0f,
                   .scratch = scratch.floats()},
                  gpu.launch());
  });
  std::vector<kernels::SumRun> runs;
  for (int64_t i = 0; i < s.parameters; i += kernels::SumRun::kMost)
    runs.push_back({i, std::min(kernels::SumRun::kMost, s.parameters - i)});
  const Memory device_runs(runs.size() * sizeof(kernels::SumRun));
  cuda::copy(device_runs.data(), runs.data(), runs.size() * sizeof(kernels::SumRun), gpu.launch().stream);
  report.row("sum of squares of all gradients", 4.0 * static_cast<double>(s.parameters), [&] {
    k::sum_squares({.num_runs = static_cast<int64_t>(runs.size()),
                    .runs = static_cast<const kernels::SumRun*>(device_runs.data()),
                    .x = grad.floats(),
                    .out = sums.doubles(),
                    .scratch = sums.doubles() + 1},
                   gpu.launch());
  });
}

void run_optimizers(const Report& report, const Sizes& s) {
  const Gpu& gpu = report.gpu();
  const int64_t n = s.parameters;
  const Random grad(gpu, DType::f32, n), main(gpu, DType::f32, n), m(gpu, DType::f32, n),
      v(gpu, DType::f32, n), model(gpu, DType::bf16, n);
  k::fill_constant({.n = n, .value = 1.0f, .x = v.floats()}, gpu.launch());  // squares: not negative
  const UpdateState state;
  const kernels::GroupFactors factors[] = {
      {{1.0f, 0.0f, 0.1f, 0.999f, 0.001f, 1e-4f, 1.0f, 1e-8f}, {1e-4f, 0.0f, 0.9f}},
      {{0.9999f, 0.0f, 0.1f, 0.999f, 0.001f, 1e-4f, 1.0f, 1e-8f}, {1e-4f, 0.1f, 0.9f}}};
  const Random low(gpu, DType::bf16, n);  // any bits will do
  // Two groups that take turns, a matrix and a vector each time.
  std::vector<std::uint8_t> of_block;
  for (int64_t i = 0; i < n; i += kGroupBlock)
    of_block.push_back(static_cast<std::uint8_t>(i % (s.width * s.width) < s.width));
  const Memory update(sizeof state), device_factors(sizeof factors), device_blocks(of_block.size());
  cuda::copy(update.data(), &state, sizeof state, gpu.launch().stream);
  cuda::copy(device_factors.data(), factors, sizeof factors, gpu.launch().stream);
  cuda::copy(device_blocks.data(), of_block.data(), of_block.size(), gpu.launch().stream);
  const auto* at = static_cast<const UpdateState*>(update.data());
  const kernels::GroupsOfElements groups{static_cast<const kernels::GroupFactors*>(device_factors.data()), 2,
                                         static_cast<const std::uint8_t*>(device_blocks.data())};
  report.row("adam", 30.0 * static_cast<double>(n), [&] {
    k::adam({.n = n,
             .groups = groups,
             .state = at,
             .grad = grad.floats(),
             .main = main.floats(),
             .m = m.floats(),
             .v = v.floats(),
             .model = model.data()},
            gpu.launch());
  });
  report.row("adam, split main weights", 28.0 * static_cast<double>(n), [&] {
    k::adam({.n = n,
             .groups = groups,
             .state = at,
             .grad = grad.floats(),
             .m = m.floats(),
             .v = v.floats(),
             .low = static_cast<std::uint16_t*>(low.data()),
             .model = model.data()},
            gpu.launch());
  });
  report.row("sgd with momentum", 22.0 * static_cast<double>(n), [&] {
    k::sgd({.n = n,
            .groups = groups,
            .state = at,
            .grad = grad.floats(),
            .main = main.floats(),
            .buffer = m.floats(),
            .model = model.data()},
           gpu.launch());
  });
}

}  // namespace
}  // namespace tessera

int main() {
  using namespace tessera;
  if (cuda::device_count() == 0) {
    std::printf("no GPU: %s\n", cuda::why_none().c_str());
    return 1;
  }
  cuda::use_device(0);
  std::printf("%s\n", cuda::describe(0).c_str());
  const Gpu gpu;
  const Report report(gpu);
  for (const Sizes& sizes : kSizes) {
    std::printf("%s, bfloat16:\n", sizes.name);
    run_elementwise(report, sizes);
    run_rope(report, sizes);
    run_norm(report, sizes, kernels::NormKind::layer);
    run_norm(report, sizes, kernels::NormKind::rms);
    run_cross_entropy(report, sizes);
    run_embedding(report, sizes);
    run_reductions(report, sizes);
    run_optimizers(report, sizes);
  }
}
