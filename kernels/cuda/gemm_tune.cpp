/// The offline search for the fastest way of a product: `tessera tune`.

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <vector>

#include "kernels/api/backends.hpp"
#include "kernels/cuda/gemm_choice.hpp"
#include "kernels/cuda/gemm_cublaslt.hpp"
#include "kernels/cuda/gemm_search.hpp"
#include "kernels/cuda/gemm_stopwatch.hpp"
#include "tessera/base/error.hpp"

namespace tessera::kernels::cuda {
namespace {

constexpr int kSuggestions = 32;
constexpr std::size_t kSplitOf = 3;  ///< the best so many are tried with other shares of k
constexpr std::array<std::int32_t, 7> kSplits{2, 3, 4, 6, 8, 12, 16};
constexpr double kMostRuns = 50;

/// One way to compute a product: as one call, or as a plain one with a pass after it.
struct Way {
  bool fused = false;
  cublasLtMatmulAlgo_t algorithm{};
  bool operator==(const Way& other) const {
    return fused == other.fused && std::memcmp(&algorithm, &other.algorithm, sizeof algorithm) == 0;
  }
};

class Search {
 public:
  Search(const Gemm& g, const Launch& launch)
      : g_(g),
        launch_(launch),
        tuner_(*launch.gemm_tuner),
        plain_(product_of(g, {})),
        fused_(product_of(g, choose_fused(g))),
        device_(lt_device()),
        stopwatch_(static_cast<cudaStream_t>(launch.stream)) {}

  const Product& whole() const { return can_fuse() ? fused_ : plain_; }

  GemmTrial run() {
    if (can_fuse()) suggest(true);
    suggest(false);
    glance();
    add_splits();
    glance();
    const auto best = fastest_way(
        seconds_, [this](std::size_t way, double budget_s) { return time(ways_[way], budget_s); });
    TESSERA_ENSURE(DeviceError, best, "cuBLASLt offers no algorithm for a ", describe_product(plain_));
    const Way& way = ways_[best->way];
    keep_algorithm(tuner_, way.fused ? fused_ : plain_, &way.algorithm);
    if (can_fuse() && !way.fused) keep_algorithm(tuner_, fused_, nullptr);
    return {.candidates = best->ran,
            .first_s = best->first_s,
            .best_s = best->seconds,
            .separate = can_fuse() && !way.fused};
  }

 private:
  bool can_fuse() const { return fused_.fused.any(); }
  const Product& product(bool fused) const { return fused ? fused_ : plain_; }

  void add(const Way& way) {
    if (std::find(ways_.begin(), ways_.end(), way) == ways_.end()) ways_.push_back(way);
  }

  /// What the library suggests, and what it suggests for those who have no workspace.
  void suggest(bool fused) {
    const Product& p = product(fused);
    const Descriptors descriptors(p);
    for (const std::size_t workspace : {device_.workspace_bytes, std::size_t{0}}) {
      for (const cublasLtMatmulAlgo_t& each :
           candidates_for(device_.handle, descriptors, p, workspace, kSuggestions))
        add({fused, each});
    }
  }

  /// The best so far with k shared out otherwise. Sums stay in fp32 and in a fixed order.
  void add_splits() {
    std::vector<std::size_t> order = by_speed(seconds_);
    order.resize(std::min(order.size(), kSplitOf));
    for (const std::size_t index : order) {
      const Way way = ways_[index];
      const Descriptors descriptors(product(way.fused));
      for (const cublasLtReductionScheme_t scheme : reduction_schemes(product(way.fused))) {
        for (const std::int32_t splits : kSplits) {
          Way other = way;
          if (set_splits(other.algorithm, splits, scheme) &&
              accepts(device_.handle, descriptors, other.algorithm, device_.workspace_bytes))
            add(other);
        }
      }
    }
  }

  static bool set_splits(cublasLtMatmulAlgo_t& algorithm, std::int32_t splits, std::uint32_t scheme) {
    return cublasLtMatmulAlgoConfigSetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits,
                                                sizeof splits) == CUBLAS_STATUS_SUCCESS &&
           cublasLtMatmulAlgoConfigSetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme,
                                                sizeof scheme) == CUBLAS_STATUS_SUCCESS;
  }

  void glance() {
    while (seconds_.size() < ways_.size()) seconds_.push_back(time(ways_[seconds_.size()], detail::kGlance));
  }

  /// As training computes it, through gemm().
  std::optional<double> time(const Way& way, double budget_s) const {
    if (can_fuse()) use_algorithm(tuner_, fused_, way.fused ? &way.algorithm : nullptr);
    if (!way.fused) use_algorithm(tuner_, plain_, &way.algorithm);
    const auto once = [this] { gemm(g_, launch_); };
    try {
      once();
    } catch (const DeviceError&) {
      return std::nullopt;  // suggested, but refused when it is to run
    }
    const double one = stopwatch_.seconds(1, once);
    return stopwatch_.seconds(static_cast<int>(std::clamp(budget_s / one, 1.0, kMostRuns)), once);
  }

  const Gemm& g_;
  const Launch& launch_;
  GemmTuner& tuner_;
  Product plain_, fused_;
  LtDevice device_;
  Stopwatch stopwatch_;
  std::vector<Way> ways_;
  std::vector<std::optional<double>> seconds_;
};

}  // namespace

GemmTrial tune_gemm(const Gemm& g, const Launch& launch) {
  TESSERA_CHECK(launch.gemm_tuner != nullptr, "a search needs a tuner that keeps what it finds");
  Search search(g, launch);
  return is_tuned(*launch.gemm_tuner, search.whole()) ? GemmTrial{.known = true} : search.run();
}

}  // namespace tessera::kernels::cuda
