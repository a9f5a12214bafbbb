#pragma once
/// The layers models are built from.

#include "tessera/autograd/functions.hpp"
#include "tessera/base/config.hpp"
#include "tessera/nn/forward.hpp"
#include "tessera/nn/module.hpp"

namespace tessera::nn {

/// y = x W^T + b, W [out, in] normal(0, std), b zeros.
class Linear : public Module {
 public:
  struct Options {
    std::int64_t in = 0, out = 0;
    bool bias = true;
    double std = 0.02;
  };
  Linear(std::string name, const Options& options);
  Var forward(const Forward& forward, const Var& x);
  /// forward(activation(x)), or forward(swiglu(x)) if kind is none, without keeping the activated values.
  Var forward_activated(const Forward& forward, const Var& x, std::optional<ops::ActivationKind> kind);

 private:
  Parameter& weight_;
  Parameter* bias_;
};

/// LayerNorm (weight and bias) or RMSNorm (weight only), fused with the residual addition before it.
class Norm : public Module {
 public:
  /// `out` is the dtype of the normalised values: the model's compute dtype.
  Norm(std::string name, std::int64_t size, NormStyle style, double eps, DType out = DType::f32);
  /// residual + dropout(branch), and its norm. branch may be empty.
  ResidualNorm forward(const Forward& forward, const Var& residual, const Var& branch,
                       const DropoutSpec& dropout = {});

 private:
  Parameter& weight_;
  Parameter* bias_;
  ops::NormOptions options_;
};

/// Token table, with a table of learned positions added if max_positions > 0, then dropout.
class Embedding : public Module {
 public:
  struct Options {
    std::int64_t vocab_size = 0, size = 0;
    std::int64_t max_positions = 0;  ///< 0 = no position table
    double std = 0.02, dropout = 0.0;
    DType out = DType::f32;  ///< dtype of the residual stream
  };
  Embedding(std::string name, const Options& options);
  /// [seq, batch, size]
  Var forward(const Forward& forward);
  Parameter& table() { return table_; }

 private:
  Options options_;
  Parameter& table_;
  Parameter* positions_;
};

/// Causal self-attention with as many KV heads as the config says, rotary or ALiBi positions, and a KV cache.
class SelfAttention : public Module {
 public:
  SelfAttention(std::string name, const ModelConfig& config, std::int64_t layer);
  /// x: [seq, batch, hidden]; rope: the model's table, or null.
  Var forward(const Forward& forward, const Var& x, const ops::RopeTable* rope, const Tensor& alibi_slopes);

 private:
  Var attend_cached(const Forward& forward, Var qkv, const SelfAttentionOptions& options);

  const ModelConfig& config_;
  std::int64_t layer_;
  Linear& qkv_;
  Linear& proj_;
};

/// Two linear layers around GELU, ReLU or SwiGLU.
class Mlp : public Module {
 public:
  Mlp(std::string name, const ModelConfig& config);
  Var forward(const Forward& forward, const Var& x);

 private:
  MlpActivation activation_;
  Linear& fc1_;
  Linear& fc2_;
};

/// Slopes of Press et al., "Train short, test long": a geometric sequence, interpolated when heads is not a
/// power of 2.
std::vector<float> alibi_slopes(std::int64_t heads);

}  // namespace tessera::nn
