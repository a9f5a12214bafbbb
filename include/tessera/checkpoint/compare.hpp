#pragma once
/// Two checkpoints held against each other, and the mean of several, a tensor at a time.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/checkpoint/hf.hpp"

namespace tessera {

/// The tensors of a run's checkpoint: weights under their own names, the rest as they are called there
/// ("adam_m.NAME").
class CheckpointWeights : public WeightSource {
 public:
  /// `with_state`: also what is no weight.
  CheckpointWeights(const std::filesystem::path& dir, bool with_state);
  std::vector<TensorSpec> tensors() const override;
  void read(const std::string& name, std::span<std::byte> out) const override;
  const CheckpointReader& reader() const { return reader_; }
  /// Whether it holds an optimizer's tensors.
  bool has_state() const;

 private:
  CheckpointReader reader_;
  bool with_state_;
};

/// How one tensor differs.
struct TensorDifference {
  enum class Kind { equal, only_in_a, only_in_b, shape, values };
  std::string name;
  Kind kind = Kind::equal;
  TensorSpec a{}, b{};         ///< of the side that has it
  double max_abs = 0;          ///< of |a - b|; infinite where one is no number and the other is
  double max_rel = 0;          ///< of |a - b| / max(|a|, |b|)
  std::int64_t different = 0;  ///< values beyond the tolerance
};
struct CompareOptions {
  double atol = 0, rtol = 0;  ///< values are equal where |a - b| <= atol + rtol * max(|a|, |b|)
};
/// Calls `tell` for every tensor of either, in the order of names. Element types may differ: values are
/// compared. Holds one tensor of each at a time. Errors: those of the sources; CheckpointError for types that
/// are no floats.
void compare_weights(const WeightSource& a, const WeightSource& b, const CompareOptions& options,
                     const std::function<void(const TensorDifference&)>& tell);

/// The weighted mean of several sources of the same names and shapes, summed in float64 and given in the
/// first one's element types. Holds one tensor of one source, and the sum, at a time.
class AveragedWeights : public WeightSource {
 public:
  /// Weights are divided by their sum. Errors: InvalidArgument for weights that are none; CheckpointError
  /// where names or shapes differ.
  AveragedWeights(std::vector<std::shared_ptr<const WeightSource>> sources, std::span<const double> weights);
  std::vector<TensorSpec> tensors() const override { return specs_; }
  void read(const std::string& name, std::span<std::byte> out) const override;

 private:
  std::vector<std::shared_ptr<const WeightSource>> sources_;
  std::vector<double> weights_;
  std::vector<TensorSpec> specs_;
  std::vector<std::vector<DType>> dtypes_;  ///< [source][tensor]
};

}  // namespace tessera
