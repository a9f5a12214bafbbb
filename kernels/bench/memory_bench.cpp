/// The kernels that live on memory bandwidth, at GPT-2 124M's sizes, beside the bandwidth of a copy on the
/// same machine. Usage: memory_bench [threads]

#include <functional>
#include <vector>

#include "kernels/api/cross_entropy.hpp"
#include "kernels/api/elementwise.hpp"
#include "kernels/api/embedding.hpp"
#include "kernels/api/reduce.hpp"
#include "kernels/bench/bench.hpp"

namespace tessera {
namespace {

using bench::Array;
namespace cpu = kernels::cpu;

constexpr std::int64_t kTokens = 1024, kWidth = 768, kHidden = 3072, kVocab = 50257;

struct Report {
  double copy_gb_s;

  void row(const std::string& name, double bytes, const std::function<void()>& f) const {
    const double s = bench::shortest(f);
    std::printf("%-34s %8.3f ms %7.1f GB/s %5.1f %% of copy\n", name.c_str(), 1e3 * s, 1e-9 * bytes / s,
                1e-7 * bytes / s / copy_gb_s);
  }
};

void run_cross_entropy(const Report& report, DType dtype, kernels::Launch launch) {
  Array logits(dtype, kTokens * kVocab), loss(DType::f32, kTokens), lse(DType::f32, kTokens),
      up(DType::f32, kTokens);
  std::vector<std::int32_t> labels(kTokens);
  for (std::int64_t i = 0; i < kTokens; ++i)
    labels[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i * 49 % kVocab);
  const double bytes = static_cast<double>(kTokens * kVocab) * static_cast<double>(size_of(dtype));
  const std::string name(name_of(dtype));
  report.row("cross-entropy forward " + name, bytes, [&] {
    cpu::cross_entropy_forward({.rows = kTokens,
                                .cols = kVocab,
                                .ld = kVocab,
                                .dtype = dtype,
                                .logits = logits.data(),
                                .labels = labels.data(),
                                .loss = loss.floats(),
                                .lse = lse.floats()},
                               launch);
  });
  // Not of the previous result but of constant logits: a gradient's exponentials would all underflow.
  report.row("cross-entropy backward " + name, 2 * bytes, [&] {
    cpu::cross_entropy_backward({.rows = kTokens,
                                 .cols = kVocab,
                                 .ld = kVocab,
                                 .dtype = dtype,
                                 .logits = logits.data(),
                                 .labels = labels.data(),
                                 .lse = lse.floats(),
                                 .upstream = up.floats()},
                                launch);
  });
}

void run_embedding(const Report& report, DType dtype, kernels::Launch launch) {
  Array table(dtype, kVocab * kWidth), positions_table(dtype, kTokens * kWidth), y(dtype, kTokens * kWidth);
  Array dtable(DType::f32, kVocab * kWidth);
  std::vector<std::int32_t> tokens(kTokens), positions(kTokens);
  for (std::int64_t i = 0; i < kTokens; ++i) {
    tokens[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i * 4999 % kVocab);
    positions[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i);
  }
  const double elements = static_cast<double>(kTokens * kWidth), size = static_cast<double>(size_of(dtype));
  for (const float p : {0.0f, 0.1f}) {
    const std::string name = std::string(name_of(dtype)) + (p > 0.0f ? " dropout" : "");
    const DropoutSpec dropout{.key = {.seed = 1}, .probability = p, .seq_length = kTokens};
    report.row("embedding forward " + name, 3 * elements * size, [&] {
      cpu::embedding_forward({.rows = kTokens,
                              .cols = kWidth,
                              .table_dtype = dtype,
                              .y_dtype = dtype,
                              .tokens = tokens.data(),
                              .table = table.data(),
                              .vocab_size = kVocab,
                              .positions = positions.data(),
                              .position_table = positions_table.data(),
                              .y = y.data(),
                              .dropout = dropout},
                             launch);
    });
    report.row("embedding backward " + name, elements * (size + 8), [&] {
      cpu::embedding_backward({.rows = kTokens,
                               .cols = kWidth,
                               .dy_dtype = dtype,
                               .dy = y.data(),
                               .index = tokens.data(),
                               .count = kVocab,
                               .dtable = dtable.floats(),
                               .beta = 1.0f,
                               .dropout = dropout},
                              launch);
    });
  }
}

void run_reductions(const Report& report, kernels::Launch launch) {
  constexpr std::int64_t n = kVocab * kWidth;
  Array x(DType::f32, n), out(DType::f32, kHidden), scratch(DType::f32, kernels::kReduceParts * kHidden);
  double total = 0.0, parts[kernels::kSumParts];
  std::vector<kernels::SumRun> runs;
  for (std::int64_t i = 0; i < n; i += kernels::SumRun::kMost)
    runs.push_back({i, std::min(kernels::SumRun::kMost, n - i)});
  report.row("sum of squares", 4.0 * n, [&] {
    cpu::sum_squares({.num_runs = static_cast<std::int64_t>(runs.size()),
                      .runs = runs.data(),
                      .x = x.floats(),
                      .out = &total,
                      .scratch = parts},
                     launch);
  });
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const double bytes = static_cast<double>(kTokens * kHidden) * static_cast<double>(size_of(dtype));
    report.row("column sum " + std::string(name_of(dtype)), bytes, [&] {
      cpu::column_sum({.rows = kTokens,
                       .cols = kHidden,
                       .ld = kHidden,
                       .dtype = dtype,
                       .x = x.data(),
                       .out = out.floats(),
                       .beta = 1.0f,
                       .scratch = scratch.floats()},
                      launch);
    });
  }
}

void run_elementwise(const Report& report, kernels::Launch launch) {
  constexpr std::int64_t n = kVocab * kWidth;
  Array x(DType::f32, n), y(DType::f32, n);
  report.row("axpby", 12.0 * n,
             [&] { cpu::axpby({.n = n, .beta = 1.0f, .x = x.data(), .y = y.data()}, launch); });
  report.row("axpby float32 to bfloat16", 6.0 * n,
             [&] { cpu::axpby({.n = n, .y_dtype = DType::bf16, .x = x.data(), .y = y.data()}, launch); });
  report.row("add", 12.0 * n,
             [&] { cpu::add({.n = n, .a = x.data(), .b = y.data(), .out = y.data()}, launch); });
  report.row("fill zero", 4.0 * n, [&] { cpu::fill_zero({.bytes = 4 * n, .x = y.data()}, launch); });
  report.row("transposition", 8.0 * n, [&] {
    cpu::copy_strided({.size = {1, 1, kVocab, kWidth},
                       .src_stride = {0, 0, kWidth, 1},
                       .dst_stride = {0, 0, 1, kVocab},
                       .src = x.data(),
                       .dst = y.data()},
                      launch);
  });
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  using namespace tessera;
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  const kernels::Launch launch{.threads = threads};
  bench::print_machine(threads);
  Report report{1.0};
  {
    constexpr std::int64_t n = kVocab * kWidth;
    bench::Array x(DType::f32, n), y(DType::f32, n);
    kernels::CopyStrided copy{.src = x.data(), .dst = y.data()};
    copy.size[3] = n;
    copy.src_stride[3] = copy.dst_stride[3] = 1;
    report.copy_gb_s = 8e-9 * n / bench::shortest([&] { kernels::cpu::copy_strided(copy, launch); });
    std::printf("copy: %.1f GB/s\n", report.copy_gb_s);
  }
  for (const DType dtype : {DType::f32, DType::bf16}) {
    run_cross_entropy(report, dtype, launch);
    run_embedding(report, dtype, launch);
  }
  run_reductions(report, launch);
  run_elementwise(report, launch);
}
