#pragma once
/// The layers models are built from.

#include "tessera/base/config_model.hpp"
#include "tessera/nn/forward.hpp"
#include "tessera/nn/module.hpp"
#include "tessera/nn/sharding.hpp"
#include "tessera/parallel/experts.hpp"
#include "tessera/parallel/functions.hpp"

namespace tessera::nn {

/// y = x W^T + b, W [out, in] normal(0, std), b zeros.
class Linear : public Module {
 public:
  /// What the tensor ranks share out: nothing, the outputs (rows of W), or the inputs (columns of W).
  enum class Split { none, column, row };
  struct Options {
    std::int64_t in = 0, out = 0;
    bool bias = true;
    double std = 0.02;
    TensorParallel tensor = {};
    Split split = Split::none;
    /// column: the runs of rows this rank holds; empty = its part of all rows.
    std::vector<Segment> rows = {};
    bool sequence_parallel = false;  ///< none: sees a part of the positions, so its gradient is a part too
    std::int64_t first_rows = 0;     ///< so many rows of the whole W are normal(0, first_std)
    double first_std = 0;
    bool expert = false;  ///< ParameterTraits::expert
  };
  Linear(std::string name, const Options& options);
  Var forward(const Forward& forward, const Var& x);
  /// forward(x), and the activation of it for the next layer's forward_activated.
  LinearActivation forward_with_activation(const Forward& forward, const Var& x, ops::ActivationKind kind);
  /// forward(activation(x)), without keeping the activated values. `activated`: these, where they are there
  /// already.
  Var forward_activated(const Forward& forward, const Var& x, ops::ActivationKind kind,
                        Tensor activated = {});
  Parameter& weight() { return weight_; }

 private:
  TensorParallel tensor_;
  Split split_;
  Parameter& weight_;
  Parameter* bias_;
};

/// LayerNorm (weight and, where wanted, bias) or RMSNorm (weight only), fused with the residual addition
/// before it.
class Norm : public Module {
 public:
  struct Options {
    std::int64_t size = 0;
    NormStyle style = NormStyle::layernorm;
    double eps = 1e-5;
    DType out = DType::f32;          ///< of the normalised values: the model's compute dtype
    bool sequence_parallel = false;  ///< sees a part of the positions, so its gradient is a part of the sum
    bool forget = false;             ///< the normalised values are computed again in backward
    bool zero_centered = false;      ///< multiplies by 1 + weight; weights begin at 0
    bool bias = true;                ///< of LayerNorm
  };
  Norm(std::string name, const Options& options);
  /// residual + dropout(branch), and its norm. branch may be empty.
  ResidualNorm forward(const Forward& forward, const Var& residual, const Var& branch,
                       const DropoutSpec& dropout = {});

 private:
  Parameter& weight_;
  Parameter* bias_;
  ops::NormOptions options_;
  bool forget_;
};

/// Token table, with a table of learned positions added if max_positions > 0, then dropout.
class Embedding : public Module {
 public:
  struct Options {
    std::int64_t vocab_size = 0, size = 0;
    std::int64_t max_positions = 0;  ///< 0 = no position table
    double std = 0.02, dropout = 0.0;
    DType out = DType::f32;  ///< dtype of the residual stream
    TensorParallel tensor = {};
    bool tied = false;             ///< another pipeline stage has a copy of the token table as its head
    std::int64_t padding_id = -1;  ///< see EmbeddingSpec
  };
  Embedding(std::string name, const Options& options);
  /// [seq, batch, size], or this rank's positions under sequence parallelism
  Var forward(const Forward& forward);
  Parameter& table() { return table_; }

 private:
  Options options_;
  Parameter& table_;
  Parameter* positions_;
};

/// Self-attention, causal or not, with as many KV heads as the config says, rotary or ALiBi positions,
/// windows, caps, normed queries and keys, and a KV cache.
class SelfAttention : public Module {
 public:
  /// `config` must outlive it.
  SelfAttention(std::string name, const ModelConfig& config, std::int64_t layer,
                const TensorParallel& tensor = {}, bool causal = true);
  SelfAttention(std::string, ModelConfig&&, std::int64_t, const TensorParallel& = {}, bool = true) = delete;
  /// x: [seq, batch, hidden]; rope: the model's table, or null.
  Var forward(const Forward& forward, const Var& x, const ops::RopeTable* rope, const Tensor& alibi_slopes);

 private:
  /// Norms over all heads, whose weights tensor ranks share as they share the heads.
  void declare_full_norms(const Init& init);
  Var norm_heads(const Forward& forward, Var qkv);

  const ModelConfig& config_;
  TensorParallel tensor_;
  std::int64_t layer_;
  bool causal_;
  HeadShare heads_;
  Linear& qkv_;
  Linear& proj_;
  Parameter *query_norm_ = nullptr, *key_norm_ = nullptr;
};

/// What follows attention in a layer.
class FeedForward : public Module {
 public:
  using Module::Module;
  /// [seq, batch, hidden], or this rank's positions under sequence parallelism.
  virtual Var forward(const Forward& forward, const Var& x) = 0;
};

/// Two linear layers around an activation, gated or not.
class Mlp : public FeedForward {
 public:
  Mlp(std::string name, const ModelConfig& config, const TensorParallel& tensor = {});
  Var forward(const Forward& forward, const Var& x) override;

 private:
  ops::ActivationKind activation_;
  Linear& fc1_;
  Linear& fc2_;
};

/// A router and the MLPs that it chooses from. Expert ranks share these out; every tensor rank has a part of
/// each, as of an Mlp.
class MixtureOfExperts : public FeedForward {
 public:
  /// Its extra losses, which keep experts evenly used and the router's logits small: their means over the
  /// layers that have experts, so that such a model's weights for them are so many times its settings.
  static constexpr const char *kBalance = "load_balancing", *kZ = "router_z";

  /// Errors: ConfigError unless the expert ranks divide the experts.
  MixtureOfExperts(std::string name, const ModelConfig& config, const TensorParallel& tensor = {},
                   const ExpertParallel& parallel = {});
  Var forward(const Forward& forward, const Var& x) override;

 private:
  Routed choose(const Forward& forward, const TensorParallel& tensor, const Var& x);

  RouterOptions options_;
  float share_;  // of this layer in the losses
  ops::ActivationKind activation_;
  TensorParallel tensor_;
  ExpertParallel parallel_;
  Linear& router_;
  ExpertWeights experts_;  // of this rank
};

/// The op of an activation.
ops::ActivationKind activation_kind(MlpActivation activation);

/// Slopes of Press et al., "Train short, test long": a geometric sequence, interpolated when heads is not a
/// power of 2.
std::vector<float> alibi_slopes(std::int64_t heads);

}  // namespace tessera::nn
