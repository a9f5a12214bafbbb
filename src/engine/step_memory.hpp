#pragma once
#include <cstdint>
#include <vector>

#include "tessera/nn/forward.hpp"

namespace tessera {

/// Memory of the device that passes and host share where a graph repeats the passes. What differs between two
/// calls lies where the recorded passes found it, and one copy writes it there before each launch:
/// micro-batches, the step's number, the gradients of losses. What the passes tell lies there for a copy
/// behind the launch.
class StepMemory {
 public:
  struct Values {
    std::vector<MicroBatch> micro_batches;  ///< on the host
    std::uint32_t step = 0;                 ///< keys dropout
    std::vector<float> gradients;           ///< of a term of the loss, by term
  };

  /// `marks`: times that the passes tell.
  StepMemory(const ExecCtx& ctx, const Values& values, std::int64_t marks);
  /// Whether another call's values would be the same work: not with other sizes, other samples of the global
  /// batch, other parts.
  bool fits(const Values& values) const;
  /// Writes them; they fit.
  void load(const Values& values);

  const MicroBatch& micro_batch(int index) const { return micro_batches_[static_cast<std::size_t>(index)]; }
  /// For RngKey::step_at.
  const std::uint32_t* step() const;
  /// f32 [terms].
  Tensor gradients() const { return words_.narrow(0, 1, terms_).reinterpret(DType::f32); }
  /// All that passes tell, which begin by filling it with zeros.
  const Tensor& told() const { return told_; }
  /// Of that f64 [terms], for the sums of losses, ...
  Tensor sums() const { return told_.narrow(0, 0, terms_).reinterpret(DType::f64); }
  /// ... and i64 [marks].
  Tensor times() const { return told_.narrow(0, terms_, told_.numel() - terms_); }

 private:
  std::int64_t terms_;
  Tensor words_, told_;
  std::vector<MicroBatch> micro_batches_;  ///< parts of words_
  std::vector<std::int64_t> work_;         ///< what must be the same
};

}  // namespace tessera
