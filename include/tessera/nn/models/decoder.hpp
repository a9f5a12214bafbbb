#pragma once
/// One decoder-only transformer: GPT-2 and Llama are settings of it (positions learned, rotary or ALiBi;
/// LayerNorm or RMSNorm; GELU or SwiGLU; as many KV heads as wanted; head tied to the embedding or not).

#include "tessera/base/config.hpp"
#include "tessera/nn/layers.hpp"
#include "tessera/nn/model.hpp"

namespace tessera {

/// Dtypes a model computes in.
struct Numerics {
  DType compute = DType::f32;   ///< weights and activations as kernels read them
  DType residual = DType::f32;  ///< the residual stream
};
/// bf16 precision keeps the residual stream in fp32 if the config says so.
Numerics numerics_of(const TrainingConfig& training);

namespace nn {

/// What flows between decoder layers: the residual stream and the branch not yet added to it.
struct ResidualStream {
  Var residual, branch;
  DropoutSpec dropout;  ///< on branch
};

class DecoderLayer : public Module {
 public:
  DecoderLayer(std::string name, const ModelConfig& config, std::int64_t layer, DType compute);
  ResidualStream forward(const Forward& forward, const ResidualStream& stream, const ops::RopeTable* rope,
                         const Tensor& alibi_slopes);

 private:
  double dropout_;
  Norm& input_norm_;
  SelfAttention& attention_;
  Norm& mlp_norm_;
  Mlp& mlp_;
};

}  // namespace nn

class Decoder : public Model {
 public:
  /// config must be resolved (base/config_file.hpp: resolve).
  Decoder(const ModelConfig& config, const Numerics& numerics);

  Var forward(const Forward& forward) override;
  Var loss(const Forward& forward, const Tensor& upstream) override;
  std::int64_t vocab_size() const override { return config_.vocab_size; }
  std::int64_t max_positions() const override { return config_.max_positions; }
  double flops_per_token(std::int64_t seq_length) const override;
  KvCache make_cache(const ExecCtx& ctx, std::int64_t batch, std::int64_t max_length) const override;
  const ModelConfig& config() const { return config_; }

 private:
  /// The normalised output of the last layer, [seq, batch, hidden].
  Var hidden(const Forward& forward);
  /// The rotary table, or null; made on first use, when the context is known.
  const ops::RopeTable* rope(const ExecCtx& ctx);

  ModelConfig config_;
  Numerics numerics_;
  nn::Embedding& embedding_;
  std::vector<nn::DecoderLayer*> layers_;
  nn::Norm* final_norm_;
  Parameter* head_;
  ops::RopeTable rope_table_;
  Tensor alibi_slopes_;
};

}  // namespace tessera
