#pragma once
/// A training run as what it takes to go on with it, whoever saved it: its settings, its counters, and of
/// each parameter the fp32 weight and Adam's moments.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/config.hpp"
#include "tessera/checkpoint/safetensors.hpp"

namespace tessera {

/// What an optimizer keeps of each parameter.
enum class RunValue {
  weight,  ///< fp32, of which 16-bit weights are copies
  exp_avg,
  exp_avg_sq
};
inline constexpr RunValue kRunValues[] = {RunValue::weight, RunValue::exp_avg, RunValue::exp_avg_sq};

struct RunCounters {
  std::int64_t step = 0;              ///< iterations, skipped ones included
  std::int64_t consumed_samples = 0;  ///< where the data goes on
  std::int64_t updates = 0;           ///< that the optimizer has made: where the schedule goes on
  std::int64_t tokens = 0;            ///< trained on so far
  std::int64_t skipped = 0;           ///< iterations whose gradient was not finite
  double loss_scale = 1;              ///< fp16 only, like the next two
  std::int64_t good_steps = 0;        ///< finite steps since the scale last changed
  std::int64_t hysteresis = 0;        ///< non-finite steps that the scale still tolerates

  friend bool operator==(const RunCounters&, const RunCounters&) = default;
};

class RunSource {
 public:
  virtual ~RunSource() = default;
  /// Where its folders are is not the source's to say.
  virtual const Config& config() const = 0;
  virtual const RunCounters& counters() const = 0;
  /// Names and shapes of the model's parameters, in its order; dtype is float32.
  virtual std::vector<TensorSpec> parameters() const = 0;
  /// Reads a value of one parameter, contiguous, `out` as large as the parameter. Errors: CheckpointError
  /// where what is stored contradicts itself; IoError.
  virtual void read(RunValue value, const std::string& name, std::span<float> out) const = 0;
};

}  // namespace tessera
