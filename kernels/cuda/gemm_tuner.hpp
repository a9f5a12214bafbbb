#pragma once
/// How the products of one engine are computed on its GPU. Free of CUDA, so that every build has it.

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernels/api/backends.hpp"
#include "kernels/cuda/gemm_cache.hpp"
#include "kernels/cuda/gemm_plan.hpp"
#include "kernels/cuda/notes.hpp"

namespace tessera {

/// Safe to use from several threads. Of one device: whoever multiplies on two has two.
class GemmTuner {
 public:
  /// How products of one key are computed.
  struct Choice {
    bool exists = false;  ///< false: cuBLASLt has no algorithm, or what it fuses is faster apart
    bool settled = true;  ///< false: to be timed when the stream is not being captured
    kernels::cuda::AlgorithmWords algorithm{};
  };

  /// Errors: IoError if choices are to be timed and the file cannot be written.
  explicit GemmTuner(const kernels::GemmTuning& options) : times_(options.tune) {
    notes_.add(memo_.open(options.cache_path, options.tune));
    notes_.add(memo_.read_tables(options.tables));
  }

  /// Whether the candidates of new products are timed.
  bool times() const { return times_; }

  /// The choice for `key`; one that is not settled is made by `choose`, one at a time.
  template <typename Choose>
  Choice choice(const kernels::cuda::ProductKey& key, Choose&& choose) {
    const std::lock_guard lock(choices_mutex_);
    // Texts of every length make ever new products. What was timed is in the memo too.
    if (choices_.size() >= kMostChoices) choices_.clear();
    Choice& slot = choices_.try_emplace(key, Choice{.settled = false}).first->second;
    if (!slot.settled) slot = choose();
    return slot;
  }
  void set_choice(const kernels::cuda::ProductKey& key, const Choice& choice) {
    const std::lock_guard lock(choices_mutex_);
    choices_[key] = choice;
  }

  /// What files say of a product (gemm_cache_key); with `timed` only the fastest.
  std::optional<kernels::cuda::KeptAlgorithm> kept(const std::string& key, bool timed) const {
    const std::lock_guard lock(memo_mutex_);
    const auto* const found = memo_.find(key, timed);
    return found == nullptr ? std::nullopt : std::optional(*found);
  }
  /// Whether the file that is written has the fastest way of it.
  bool is_tuned(const std::string& key) const {
    const std::lock_guard lock(memo_mutex_);
    return memo_.find_own(key) != nullptr;
  }
  void keep(const std::string& key, const kernels::cuda::KeptAlgorithm& algorithm) {
    const std::lock_guard lock(memo_mutex_);
    memo_.put(key, algorithm);
  }

  kernels::cuda::Notes& notes() { return notes_; }

 private:
  static constexpr std::size_t kMostChoices = 1 << 16;

  const bool times_;
  std::mutex choices_mutex_;
  std::unordered_map<kernels::cuda::ProductKey, Choice, kernels::cuda::ProductKeyHash> choices_;
  mutable std::mutex memo_mutex_;  ///< guards memo_; taken within choices_mutex_, never around it
  kernels::cuda::GemmMemo memo_;
  kernels::cuda::Notes notes_;
};

}  // namespace tessera
