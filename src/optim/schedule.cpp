#include "tessera/optim/schedule.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "tessera/base/error.hpp"

namespace tessera {
namespace {

/// From 1 at x = 0 to 0 at x = 1.
double half_cosine(double x) { return 0.5 * (1.0 + std::cos(std::numbers::pi * x)); }

double wsd_coefficient(WsdStyle style, double y) {
  switch (style) {
    case WsdStyle::linear:
      return 1.0 - y;
    case WsdStyle::cosine:
      return half_cosine(y);
    case WsdStyle::exponential:
      return 2.0 * std::pow(0.5, y) - 1.0;
    case WsdStyle::minus_sqrt:
      return 1.0 - std::sqrt(y);
  }
  return 0.0;
}

void check_updates(std::int64_t updates) {
  TESSERA_CHECK(updates >= 0, "a schedule starts at update 0, not ", updates);
}

}  // namespace

LrSchedule::LrSchedule(const LrScheduleConfig& config, double lr, std::int64_t training_steps)
    : config_(config), lr_(lr) {
  if (config_.decay_steps == 0) config_.decay_steps = training_steps;
  TESSERA_ENSURE(ConfigError, std::isfinite(lr) && lr >= 0, "optimizer.lr is ", lr,
                 "; it must be a number >= 0");
  TESSERA_ENSURE(ConfigError, config_.min_lr >= 0 && config_.min_lr <= lr, "lr_schedule.min_lr is ",
                 config_.min_lr, "; it must lie between 0 and optimizer.lr (", lr, ")");
  TESSERA_ENSURE(ConfigError, config_.init_lr >= 0 && config_.init_lr <= lr, "lr_schedule.init_lr is ",
                 config_.init_lr, "; it must lie between 0 and optimizer.lr (", lr, ")");
  TESSERA_ENSURE(ConfigError, config_.warmup_steps >= 0, "lr_schedule.warmup_steps is ", config_.warmup_steps,
                 "; it must be >= 0");
  if (config_.style == LrStyle::constant) return;
  TESSERA_ENSURE(ConfigError, config_.decay_steps >= config_.warmup_steps && config_.decay_steps > 0,
                 "lr_schedule.decay_steps (", config_.decay_steps,
                 ", by default training.steps) must be > 0 and not below lr_schedule.warmup_steps (",
                 config_.warmup_steps, ")");
  if (config_.style == LrStyle::wsd) {
    TESSERA_ENSURE(ConfigError, config_.wsd_decay_steps > 0 && config_.wsd_decay_steps <= config_.decay_steps,
                   "lr_schedule.wsd_decay_steps is ", config_.wsd_decay_steps,
                   "; style wsd needs 1 to lr_schedule.decay_steps (", config_.decay_steps,
                   ") annealing steps");
  }
}

double LrSchedule::at(std::int64_t updates) const {
  check_updates(updates);
  const std::int64_t warmup = config_.warmup_steps;
  if (warmup > 0 && updates <= warmup) {
    return config_.init_lr +
           (lr_ - config_.init_lr) * static_cast<double>(updates) / static_cast<double>(warmup);
  }
  if (config_.style == LrStyle::constant) return lr_;
  if (updates > config_.decay_steps) return config_.min_lr;
  return annealed(updates);
}

double LrSchedule::annealed(std::int64_t updates) const {
  const std::int64_t warmup = config_.warmup_steps;
  if (config_.style == LrStyle::inverse_sqrt) {
    const auto from = static_cast<double>(std::max<std::int64_t>(warmup, 1));
    const auto now = static_cast<double>(std::max<std::int64_t>(updates, 1));
    return std::max(config_.min_lr, lr_ * std::sqrt(from) / std::sqrt(now));
  }
  double coefficient = 1.0;
  if (config_.style == LrStyle::wsd) {
    const std::int64_t past = updates - (config_.decay_steps - config_.wsd_decay_steps);
    if (past > 0) {
      const double y = static_cast<double>(past) / static_cast<double>(config_.wsd_decay_steps);
      coefficient = wsd_coefficient(config_.wsd_style, y);
    }
  } else {
    const double x =
        static_cast<double>(updates - warmup) / static_cast<double>(config_.decay_steps - warmup);
    coefficient = config_.style == LrStyle::cosine ? half_cosine(x) : 1.0 - x;
  }
  return config_.min_lr + coefficient * (lr_ - config_.min_lr);
}

WeightDecaySchedule::WeightDecaySchedule(const LrScheduleConfig& config, double weight_decay,
                                         std::int64_t training_steps)
    : style_(config.weight_decay_style),
      start_(weight_decay),
      end_(config.end_weight_decay.value_or(weight_decay)),
      steps_(training_steps) {
  TESSERA_ENSURE(ConfigError, start_ >= 0 && end_ >= start_ && std::isfinite(end_),
                 "weight decay goes from optimizer.weight_decay (", start_,
                 ") to lr_schedule.end_weight_decay (", end_, "): it must be >= 0 and must not fall");
  TESSERA_ENSURE(ConfigError, style_ != WeightDecayStyle::constant || end_ == start_,
                 "lr_schedule.end_weight_decay (", end_, ") differs from optimizer.weight_decay (", start_,
                 ") although lr_schedule.weight_decay_style is constant; set it to linear or cosine");
}

double WeightDecaySchedule::at(std::int64_t updates) const {
  check_updates(updates);
  if (style_ == WeightDecayStyle::constant || updates >= steps_) return end_;
  const double y = static_cast<double>(updates) / static_cast<double>(steps_);
  return start_ + (style_ == WeightDecayStyle::linear ? y : half_cosine(1.0 - y)) * (end_ - start_);
}

}  // namespace tessera
