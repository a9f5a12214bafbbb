#include "tessera/nn/layers.hpp"

#include <cmath>

#include "nn/mlp_linears.hpp"

namespace tessera::nn {
namespace {

/// The part of a tensor of shape `global` that this rank holds of a linear's weight (rank 2) or bias (rank
/// 1).
Placement placement(const Linear::Options& options, const Shape& global) {
  const TensorParallel& tp = options.tensor;
  if (options.split == Linear::Split::none || !tp.active()) return Placement::replicated(global);
  if (options.split == Linear::Split::column) {
    return options.rows.empty() ? Placement::split(global, 0, tp.rank(), tp.size())
                                : Placement::segmented(global, 0, options.rows);
  }
  return global.rank() == 2 ? Placement::split(global, 1, tp.rank(), tp.size())
                            : Placement::replicated(global);
}

/// Without tensor ranks the table is whole, whatever the mesh around it: then each of its ranks holds a copy.
Placement table_placement(const Embedding::Options& options) {
  const Shape global{options.vocab_size, options.size};
  return options.tensor.active() ? Placement::split(global, 0, options.tensor.rank(), options.tensor.size())
                                 : Placement::replicated(global);
}

ParameterTraits traits(const Norm::Options& options) {
  return {.reads_main = true, .partial_over_tensor = options.sequence_parallel};
}

}  // namespace

ops::ActivationKind activation_kind(MlpActivation activation) {
  switch (activation) {
    case MlpActivation::gelu_tanh:
      return ops::ActivationKind::gelu_tanh;
    case MlpActivation::gelu:
      return ops::ActivationKind::gelu_erf;
    case MlpActivation::relu:
      return ops::ActivationKind::relu;
    case MlpActivation::swiglu:
      return ops::ActivationKind::swiglu;
    case MlpActivation::geglu:
      return ops::ActivationKind::geglu;
  }
  throw InternalError("unknown activation");
}

Linear::Linear(std::string name, const Options& options)
    : Module(std::move(name)),
      tensor_(options.split == Split::none ? TensorParallel() : options.tensor),
      split_(options.split),
      weight_(parameter("weight", placement(options, {options.out, options.in}),
                        Init::normal(static_cast<float>(options.std), options.first_rows,
                                     static_cast<float>(options.first_std)),
                        {.partial_over_tensor = options.sequence_parallel, .expert = options.expert})),
      bias_(options.bias ? &parameter("bias", placement(options, {options.out}), Init::zeros(),
                                      {.partial_over_tensor = options.sequence_parallel})
                         : nullptr) {}

Var Linear::forward(const Forward& forward, const Var& x) {
  const TensorParallel tensor = forward.shared(tensor_);
  return split_ == Split::row ? row_linear(forward.exec, tensor, x, weight_, bias_)
                              : column_linear(forward.exec, tensor, x, weight_, bias_);
}

LinearActivation Linear::forward_with_activation(const Forward& forward, const Var& x,
                                                 ops::ActivationKind kind) {
  TESSERA_CHECK(split_ != Split::row, "a linear split by rows does not take an activation behind it");
  return column_linear_with_activation(forward.exec, forward.shared(tensor_), x, weight_, bias_, kind);
}

Var Linear::forward_activated(const Forward& forward, const Var& x, ops::ActivationKind kind,
                              Tensor activated) {
  TESSERA_CHECK(split_ != Split::column, "a linear split by columns does not take an activation in front");
  return activated_row_linear(forward.exec, forward.shared(tensor_), x, kind, weight_, bias_,
                              std::move(activated));
}

Norm::Norm(std::string name, const Options& options)
    : Module(std::move(name)),
      weight_(parameter("weight", Shape{options.size}, options.zero_centered ? Init::zeros() : Init::ones(),
                        traits(options))),
      bias_(options.style == NormStyle::layernorm && options.bias
                ? &parameter("bias", Shape{options.size}, Init::zeros(), traits(options))
                : nullptr),
      options_{options.style == NormStyle::rmsnorm, static_cast<float>(options.eps), options.out,
               options.zero_centered},
      forget_(options.forget) {}

ResidualNorm Norm::forward(const Forward& forward, const Var& residual, const Var& branch,
                           const DropoutSpec& dropout) {
  return add_norm(forward.exec, residual, branch, weight_, bias_, options_, dropout, forget_);
}

Embedding::Embedding(std::string name, const Options& options)
    : Module(std::move(name)),
      options_(options),
      table_(parameter("word_embeddings.weight", table_placement(options),
                       Init::normal(static_cast<float>(options.std)),
                       {.reads_main = true, .tied = options.tied})),
      positions_(
          options.max_positions > 0
              ? &parameter("position_embeddings.weight", Shape{options.max_positions, options.size},
                           Init::normal(static_cast<float>(options.std)),
                           {.reads_main = true, .partial_over_tensor = options.tensor.sharded_sequence()})
              : nullptr) {}

Var Embedding::forward(const Forward& forward) {
  return vocab_embedding(forward.exec, forward.shared(options_.tensor), forward.tokens(), table_,
                         forward.input.positions, positions_,
                         {options_.out, forward.dropout(name(), options_.dropout), options_.padding_id});
}

Linear::Options fc1_options(const ModelConfig& config, const TensorParallel& tensor, std::int64_t width) {
  return {.in = config.hidden_size,
          .out = width * (is_gated(config.activation) ? 2 : 1),
          .bias = config.linear_bias,
          .std = config.init_std,
          .tensor = tensor,
          .split = Linear::Split::column,
          .rows = fc1_rows(config, tensor, width)};
}

Linear::Options fc2_options(const ModelConfig& config, const TensorParallel& tensor, std::int64_t width) {
  return {.in = width,
          .out = config.hidden_size,
          .bias = config.linear_bias,
          .std = config.init_std / std::sqrt(2.0 * static_cast<double>(config.num_layers)),
          .tensor = tensor,
          .split = Linear::Split::row};
}

Mlp::Mlp(std::string name, const ModelConfig& config, const TensorParallel& tensor)
    : FeedForward(std::move(name)),
      activation_(activation_kind(config.activation)),
      fc1_(submodule<Linear>("linear_fc1", fc1_options(config, tensor, config.ffn_hidden_size))),
      fc2_(submodule<Linear>("linear_fc2", fc2_options(config, tensor, config.ffn_hidden_size))) {}

Var Mlp::forward(const Forward& forward, const Var& x) {
  if (ops::is_gated(activation_))
    return fc2_.forward_activated(forward, fc1_.forward(forward, x), activation_);
  LinearActivation h = fc1_.forward_with_activation(forward, x, activation_);
  return fc2_.forward_activated(forward, h.pre, activation_, std::move(h.y));
}

std::vector<float> alibi_slopes(std::int64_t heads) {
  // 2^(-8/n), 2^(-16/n), ... for the largest power of two n; every other slope of 2n for what is left.
  std::int64_t n = 1;
  while (2 * n <= heads) n *= 2;
  std::vector<float> slopes;
  for (std::int64_t i = 1; i <= n; ++i)
    slopes.push_back(static_cast<float>(std::exp2(-8.0 * static_cast<double>(i) / static_cast<double>(n))));
  for (std::int64_t i = 1; static_cast<std::int64_t>(slopes.size()) < heads; i += 2) {
    slopes.push_back(static_cast<float>(std::exp2(-4.0 * static_cast<double>(i) / static_cast<double>(n))));
  }
  return slopes;
}

}  // namespace tessera::nn
