#pragma once
/// Learning-rate and weight-decay schedules: pure functions of the number of updates done so far, with the
/// rules of Megatron's parameter scheduler (its unit, samples, is ours, updates, times the global batch
/// size).
///
/// As in Megatron the value for an update is the one at the number of updates applied before it: the first
/// update of a warm-up from init_lr 0 has learning rate 0, update n + 1 has lr(n), and a skipped update does
/// not advance anything.

#include <cstdint>

#include "tessera/base/config_optimizer.hpp"

namespace tessera {

/// With W warm-up steps, D decay steps, Z of them the annealing of WSD:
/// n <= W (W > 0): init_lr + (lr - init_lr) n / W. Then constant: lr. After D: min_lr.
/// inverse-square-root: max(min_lr, lr sqrt(max(W, 1) / max(n, 1))). Otherwise min_lr + c (lr - min_lr) with,
/// for x = (n - W) / (D - W): linear c = 1 - x, cosine c = (1 + cos(pi x)) / 2; wsd: c = 1 until D - Z, then
/// with y = (n - D + Z) / Z: linear 1 - y, cosine (1 + cos(pi y)) / 2, exponential 2 * 0.5^y - 1, minus_sqrt
/// 1 - sqrt(y).
class LrSchedule {
 public:
  /// `lr` is the highest value (optimizer.lr); decay_steps 0 stands for `training_steps`.
  /// Errors: ConfigError, naming the key, for values no schedule can follow.
  LrSchedule(const LrScheduleConfig& config, double lr, std::int64_t training_steps);
  /// Learning rate of the update that comes after `updates` applied ones (>= 0).
  double at(std::int64_t updates) const;

 private:
  double annealed(std::int64_t updates) const;

  LrScheduleConfig config_;
  double lr_;
};

/// From weight_decay at 0 to end_weight_decay at `training_steps` and after: linear, or cosine
/// start + (1 + cos(pi (1 - n / N))) / 2 (end - start); constant throughout.
class WeightDecaySchedule {
 public:
  /// Errors: ConfigError if the end lies below the start, or differs from it with style constant.
  WeightDecaySchedule(const LrScheduleConfig& config, double weight_decay, std::int64_t training_steps);
  /// Weight decay of the update that comes after `updates` applied ones (>= 0).
  double at(std::int64_t updates) const;

 private:
  WeightDecayStyle style_;
  double start_, end_;
  std::int64_t steps_;
};

}  // namespace tessera
