#pragma once
/// The sections `optimizer`, `offload` and `lr_schedule` of a training configuration.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/config_words.hpp"

namespace tessera {

struct OptimizerConfig {
  OptimizerName name = OptimizerName::adamw;
  double lr = 6e-4;
  std::vector<double> betas = {0.9, 0.95};
  double eps = 1e-8;
  double weight_decay = 0.1;
  double momentum = 0.9;   ///< sgd only
  bool nesterov = false;   ///< sgd only
  double clip_grad = 1.0;  ///< 0 = off
  /// Parameters whose name matches one of these globs get no weight decay, besides biases and norms (1-D
  /// tensors).
  std::vector<std::string> no_decay = {};
  bool split_main_weights = false;  ///< bf16: fp32 main weights as the bf16 weights and their low 16 bits

  friend bool operator==(const OptimizerConfig&, const OptimizerConfig&) = default;
};

/// What lies outside the device's memory while it is not used.
struct OffloadConfig {
  OffloadTo optimizer = OffloadTo::none;           ///< its state, and main weights that no kernel reads
  OffloadTo gradients = OffloadTo::none;           ///< this rank's share, none or cpu; from ZeRO-2 on
  OffloadTo parameters = OffloadTo::none;          ///< what kernels read, none or cpu; ZeRO-3
  OffloadTo activations = OffloadTo::none;         ///< inputs of recomputed layers, none or cpu
  std::optional<std::string> path = std::nullopt;  ///< of nvme: a folder
  double ratio = 1.0;                              ///< of the optimizer's numbers that are offloaded
  bool pin_memory = true;                          ///< host memory that GPUs copy by themselves
  std::int64_t tile = 1 << 20;                     ///< elements that travel together
  std::int64_t buffers = 4;                        ///< of nvme: tiles in host memory at once

  /// A CPU's memory, and meta's, counts as another place than the host's, as a GPU's is: to plan for a GPU,
  /// and to try without one what a run on it does. No setting of a file.
  bool memory_apart = false;

  bool any() const {
    return optimizer != OffloadTo::none || gradients != OffloadTo::none || parameters != OffloadTo::none ||
           activations != OffloadTo::none;
  }

  friend bool operator==(const OffloadConfig&, const OffloadConfig&) = default;
};

struct LrScheduleConfig {
  LrStyle style = LrStyle::cosine;
  std::int64_t warmup_steps = 0;
  std::int64_t decay_steps = 0;  ///< 0 = training.steps
  double min_lr = 0.0;
  double init_lr = 0.0;  ///< at step 0 of the warm-up
  WsdStyle wsd_style = WsdStyle::exponential;
  std::int64_t wsd_decay_steps = 0;
  WeightDecayStyle weight_decay_style = WeightDecayStyle::constant;
  std::optional<double> end_weight_decay = std::nullopt;  ///< null = optimizer.weight_decay throughout

  friend bool operator==(const LrScheduleConfig&, const LrScheduleConfig&) = default;
};

}  // namespace tessera
