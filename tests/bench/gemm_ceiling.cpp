/// The matrix products of one GPT-2 training step and nothing else: what a step would take if all other work
/// were free. Every layer has its own weights and gradients, so caches help no more than in training. Usage:
/// gemm_ceiling --layers L --hidden C --vocab V --batch B --seq S --precision fp32|bf16 --threads T Prints
/// one line of JSON: {"seconds": median of one step, "flop_per_s": ...}. Other flags are ignored.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "kernels/api/gemm.hpp"
#include "kernels/api/launch.hpp"

namespace {

using namespace tessera;
using namespace tessera::kernels;

/// Uninitialised products would be fast or slow by accident (denormals); a constant is neither.
class Buffer {
 public:
  Buffer(std::int64_t elements, DType dtype)
      : bytes_(static_cast<std::size_t>(elements) * (dtype == DType::f32 ? 4 : 2)) {
    // 0x3d80 is 2^-4 in bf16, and repeated, a normal number near it in fp32.
    for (std::size_t i = 0; i + 1 < bytes_.size(); i += 2) bytes_[i] = 0x80, bytes_[i + 1] = 0x3d;
  }
  void* data() { return bytes_.data(); }

 private:
  std::vector<unsigned char> bytes_;
};

struct Linear {
  Linear(std::int64_t out_features, std::int64_t in_features, DType dtype)
      : out(out_features), in(in_features), weight(out * in, dtype), grad(out * in, DType::f32) {}

  std::int64_t out, in;
  Buffer weight;  ///< [out, in]
  Buffer grad;    ///< [out, in], fp32: accumulated into
};

struct Bench {
  std::int64_t rows;
  DType dtype;
  Launch launch;
  Buffer x, dy;  ///< inputs, large enough for every product, which reads what it needs from their front
  Buffer y, dx;  ///< results; never read, so values do not grow from layer to layer
  double flop = 0;

  Gemm product(std::int64_t m, std::int64_t n, std::int64_t k) {
    flop += 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
    Gemm gemm;
    gemm.m = m, gemm.n = n, gemm.k = k;
    gemm.ldc = n;
    gemm.ab_dtype = dtype;
    return gemm;
  }

  void forward(Linear& linear) {  // y [rows, out] = x [rows, in] W^T
    Gemm gemm = product(rows, linear.out, linear.in);
    gemm.a = x.data(), gemm.lda = linear.in;
    gemm.b = linear.weight.data(), gemm.ldb = linear.in, gemm.trans_b = true;
    gemm.c = y.data(), gemm.c_dtype = dtype;
    cpu::gemm(gemm, launch);
  }

  void backward(Linear& linear) {
    Gemm input = product(rows, linear.in, linear.out);  // dx [rows, in] = dy W
    input.a = dy.data(), input.lda = linear.out;
    input.b = linear.weight.data(), input.ldb = linear.in;
    input.c = dx.data(), input.c_dtype = dtype;
    cpu::gemm(input, launch);

    Gemm weight = product(linear.out, linear.in, rows);  // dW [out, in] += dy^T x
    weight.a = dy.data(), weight.lda = linear.out, weight.trans_a = true;
    weight.b = x.data(), weight.ldb = linear.in;
    weight.c = linear.grad.data(), weight.c_dtype = DType::f32, weight.beta = 1.0f;
    cpu::gemm(weight, launch);
  }
};

std::map<std::string, std::string> parse(int argc, char** argv) {
  std::map<std::string, std::string> flags{{"layers", "12"},     {"hidden", "768"}, {"vocab", "50257"},
                                           {"batch", "1"},       {"seq", "1024"},   {"threads", "1"},
                                           {"precision", "fp32"}};
  for (int i = 1; i + 1 < argc; i += 2) flags[std::string(argv[i]).substr(2)] = argv[i + 1];
  return flags;
}

}  // namespace

int main(int argc, char** argv) {
  const auto flags = parse(argc, argv);
  const auto number = [&](const char* name) { return std::int64_t{std::atoll(flags.at(name).c_str())}; };
  const std::int64_t hidden = number("hidden"), vocab = number("vocab"),
                     rows = number("batch") * number("seq");
  const DType dtype = flags.at("precision") == "bf16" ? DType::bf16 : DType::f32;

  std::vector<Linear> linears;
  for (std::int64_t layer = 0; layer < number("layers"); ++layer) {
    linears.emplace_back(3 * hidden, hidden, dtype);
    linears.emplace_back(hidden, hidden, dtype);
    linears.emplace_back(4 * hidden, hidden, dtype);
    linears.emplace_back(hidden, 4 * hidden, dtype);
  }
  linears.emplace_back(vocab, hidden, dtype);

  const std::int64_t narrow = rows * 4 * hidden, wide = rows * std::max(vocab, 4 * hidden);
  Bench bench{.rows = rows,
              .dtype = dtype,
              .launch = {.threads = static_cast<int>(number("threads"))},
              .x = Buffer(narrow, dtype),
              .dy = Buffer(wide, dtype),
              .y = Buffer(wide, dtype),
              .dx = Buffer(narrow, dtype)};
  std::vector<double> seconds;
  for (int step = 0; step < 6; ++step) {
    bench.flop = 0;
    const auto begin = std::chrono::steady_clock::now();
    for (auto& linear : linears) bench.forward(linear);
    std::reverse(linears.begin(), linears.end());
    for (auto& linear : linears) bench.backward(linear);
    std::reverse(linears.begin(), linears.end());
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  std::sort(seconds.begin() + 1, seconds.end());  // the first step creates the primitives
  const double median = seconds[3];
  std::printf("{\"seconds\": %.6f, \"flop_per_s\": %.6e}\n", median, bench.flop / median);
}
