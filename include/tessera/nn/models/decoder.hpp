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
/// bf16 and fp16 keep the residual stream in fp32 if the config says so.
Numerics numerics_of(const TrainingConfig& training);

namespace nn {

/// What flows between decoder layers: the residual stream and the branch not yet added to it.
struct ResidualStream {
  Var residual, branch;
  DropoutSpec dropout;  ///< on branch
};

class DecoderLayer : public Module {
 public:
  struct Options {
    DType compute = DType::f32;
    TensorParallel tensor = {};
    bool forget_norms = false;  ///< selective recomputation
  };
  DecoderLayer(std::string name, const ModelConfig& config, std::int64_t layer, const Options& options);
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
  /// config must be resolved (base/config_file.hpp: resolve). Errors: ConfigError for a sharding that does
  /// not fit.
  Decoder(const ModelConfig& config, const Numerics& numerics, const Sharding& sharding = {});

  /// All pieces, one after the other; for ranks that hold the whole model.
  Var forward(const Forward& forward) override;
  Var loss(const Forward& forward, const Tensor& upstream) override;
  int num_pieces() const override { return static_cast<int>(pieces_.size()); }
  Var run_piece(const Forward& forward, int piece, const Var& input, Output output,
                const Tensor& upstream) override;
  bool is_last(int piece) const override { return pieces_[static_cast<std::size_t>(piece)].head; }
  int pieces_using(const Parameter& parameter) const override;
  std::pair<Shape, DType> boundary(std::int64_t batch, std::int64_t seq_length) const override;
  std::int64_t vocab_size() const override { return config_.vocab_size; }
  std::int64_t max_positions() const override;
  std::int64_t position_limit() const override;
  void check_length(std::int64_t seq_length) const override;
  std::int64_t reserve_positions(const ExecCtx& ctx, std::int64_t positions) override;
  double flops_per_token(std::int64_t seq_length) const override;
  KvCache make_cache(const ExecCtx& ctx, std::int64_t batch, std::int64_t max_length) const override;
  const ModelConfig& config() const { return config_; }

 private:
  using Stream = nn::ResidualStream;
  struct Piece {
    std::vector<nn::DecoderLayer*> layers;
    bool embedding = false, head = false;
  };

  void add_piece(const ModelPiece& piece);
  void add_head();
  Var run_all(const Forward& forward, Output output, const Tensor& upstream);
  Stream run_layers(const Forward& forward, const Piece& piece, Stream stream);
  /// Layers [first, first + count) of a piece, computed again in backward.
  Stream run_recomputed(const Forward& forward, const Piece& piece, std::size_t first, std::size_t count,
                        const Stream& stream);
  Var run_head(const Forward& forward, const Stream& stream, Output output, const Tensor& upstream);
  /// What depends on positions and not on weights: made on first use, when the context is known.
  void make_tables(const ExecCtx& ctx);
  void make_rope(const ExecCtx& ctx, std::int64_t positions);
  const ops::RopeTable* rope() const { return rope_table_.cos ? &rope_table_ : nullptr; }

  ModelConfig config_;
  Numerics numerics_;
  Sharding sharding_;
  std::vector<Piece> pieces_;
  nn::Embedding* embedding_ = nullptr;
  nn::Norm* final_norm_ = nullptr;
  Parameter* head_ = nullptr;
  ops::RopeTable rope_table_;
  Tensor alibi_slopes_;
};

}  // namespace tessera
