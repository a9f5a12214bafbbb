#pragma once
/// What an optimizer of Megatron says beside its tensors: its groups, the number of its updates, the state of
/// its factor on the loss.

#include <optional>
#include <string>
#include <vector>

#include "checkpoint/megatron_names.hpp"
#include "checkpoint/torch_file.hpp"

namespace tessera::checkpoint_detail {

inline constexpr const char* kWeightsAlone = "Convert the weights alone, without --with_optimizer.";

/// What parameters a group has, told by its factor on weight decay.
struct OptimizerGroup {
  bool decays = true;
  const PickleValue* params = nullptr;  ///< null: it does not say
};

struct ScalerFacts {
  double loss_scale = 1;
  std::int64_t good_steps = 0, hysteresis = 0;
};

struct OptimizerFacts {
  std::int64_t updates = 0;
  bool counted = false;                              ///< whether `updates` was said
  std::optional<ScalerFacts> scaler = std::nullopt;  ///< of fp16
};

/// Errors of all members: CheckpointError naming the file and the value.
class OptimizerValues {
 public:
  /// `file`: whose values are read; it outlives this.
  explicit OptimizerValues(const TorchFile& file) : file_(file) {}

  [[noreturn]] void fail(const std::string& where, const std::string& reason,
                         const char* remedy = kWholeMegatron) const;
  static double number(const PickleValue* value, double absent);
  /// A count of updates, or nothing; all that are said are one.
  void count(const PickleValue* value, const std::string& where);
  /// The groups of Adam that have parameters.
  std::vector<OptimizerGroup> groups(const PickleValue& inner);
  /// `grad_scaler`; null, or one without a scale: there is none.
  std::optional<ScalerFacts> scaler(const PickleValue* value) const;
  const OptimizerFacts& facts() const { return facts_; }

 private:
  std::optional<double> scalar(const PickleValue* value) const;
  void check_group(const PickleValue& group, const std::string& where) const;

  const TorchFile& file_;
  OptimizerFacts facts_;
};

}  // namespace tessera::checkpoint_detail
