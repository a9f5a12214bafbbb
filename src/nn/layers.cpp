#include "tessera/nn/layers.hpp"

#include <cmath>

namespace tessera::nn {
namespace {

/// None stands for SwiGLU.
std::optional<ops::ActivationKind> activation_kind(MlpActivation activation) {
  switch (activation) {
    case MlpActivation::gelu_tanh:
      return ops::ActivationKind::gelu_tanh;
    case MlpActivation::gelu:
      return ops::ActivationKind::gelu_erf;
    case MlpActivation::relu:
      return ops::ActivationKind::relu;
    case MlpActivation::swiglu:
      break;
  }
  return std::nullopt;
}

}  // namespace

Linear::Linear(std::string name, const Options& options)
    : Module(std::move(name)),
      weight_(parameter("weight", {options.out, options.in}, Init::normal(static_cast<float>(options.std)))),
      bias_(options.bias ? &parameter("bias", {options.out}, Init::zeros()) : nullptr) {}

Var Linear::forward(const Forward& forward, const Var& x) { return linear(forward.exec, x, weight_, bias_); }

Var Linear::forward_activated(const Forward& forward, const Var& x, std::optional<ops::ActivationKind> kind) {
  return activated_linear(forward.exec, x, kind, weight_, bias_);
}

Norm::Norm(std::string name, std::int64_t size, NormStyle style, double eps, DType out)
    : Module(std::move(name)),
      weight_(parameter("weight", {size}, Init::ones())),
      bias_(style == NormStyle::layernorm ? &parameter("bias", {size}, Init::zeros()) : nullptr),
      options_{style == NormStyle::rmsnorm, static_cast<float>(eps), out} {}

ResidualNorm Norm::forward(const Forward& forward, const Var& residual, const Var& branch,
                           const DropoutSpec& dropout) {
  return add_norm(forward.exec, residual, branch, weight_, bias_, options_, dropout);
}

Embedding::Embedding(std::string name, const Options& options)
    : Module(std::move(name)),
      options_(options),
      table_(parameter("word_embeddings.weight", {options.vocab_size, options.size},
                       Init::normal(static_cast<float>(options.std)))),
      positions_(options.max_positions > 0
                     ? &parameter("position_embeddings.weight", {options.max_positions, options.size},
                                  Init::normal(static_cast<float>(options.std)))
                     : nullptr) {}

Var Embedding::forward(const Forward& forward) {
  return embedding(forward.exec, forward.tokens(), table_, forward.input.positions, positions_, options_.out,
                   forward.dropout(name(), options_.dropout));
}

Mlp::Mlp(std::string name, const ModelConfig& config)
    : Module(std::move(name)),
      activation_(*config.activation),
      fc1_(submodule<Linear>(
          "linear_fc1",
          Linear::Options{config.hidden_size,
                          config.ffn_hidden_size * (*config.activation == MlpActivation::swiglu ? 2 : 1),
                          *config.linear_bias, config.init_std})),
      fc2_(submodule<Linear>(
          "linear_fc2",
          Linear::Options{config.ffn_hidden_size, config.hidden_size, *config.linear_bias,
                          config.init_std / std::sqrt(2.0 * static_cast<double>(config.num_layers))})) {}

Var Mlp::forward(const Forward& forward, const Var& x) {
  return fc2_.forward_activated(forward, fc1_.forward(forward, x), activation_kind(activation_));
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
