#pragma once
/// One decoder-only transformer: families (base/families.hpp) are settings of it (positions learned, rotary
/// or ALiBi; LayerNorm or RMSNorm; GELU or SwiGLU; as many KV heads as wanted; head tied to the embedding or
/// not; attention and MLP one after the other or beside each other).

#include <map>

#include "tessera/base/config_model.hpp"
#include "tessera/nn/layers.hpp"
#include "tessera/nn/stack.hpp"

namespace tessera {
namespace nn {

/// What attention needs of positions and no weights: made on first use, when the context is known.
class PositionTables {
 public:
  /// `config` must outlive it.
  explicit PositionTables(const ModelConfig& config) : config_(config) {}
  explicit PositionTables(ModelConfig&&) = delete;
  /// For a pass over sequences of `length` positions, which some rules depend on.
  void make(const ExecCtx& ctx, std::int64_t length);
  /// Sees to rotary angles of `positions` positions, of at most `limit`. Returns how many there are.
  std::int64_t reserve(const ExecCtx& ctx, std::int64_t positions, std::int64_t limit);
  /// Of a layer, in sequences of `length` positions; null without rotary positions.
  const ops::RopeTable* rope(std::int64_t layer, std::int64_t length) const;
  /// Sequences longer than this are stretched by their length, so that none may begin anew within one; 0 =
  /// none.
  std::int64_t longest_usual() const { return ops::longest_usual(rule()); }
  /// [num_heads]; undefined without ALiBi.
  const Tensor& alibi_slopes() const { return alibi_slopes_; }

 private:
  bool rotary() const { return config_.position_embedding == PositionKind::rotary; }
  ops::RopeRule rule() const;
  /// Lengths with the same angles have the same key.
  std::int64_t key_of(std::int64_t length) const;
  void make_rope(const ExecCtx& ctx, std::int64_t positions, std::int64_t length);

  const ModelConfig& config_;
  std::int64_t made_ = 0;                         // positions of every table
  std::map<std::int64_t, ops::RopeTable> ropes_;  // by key_of(length): passes under way keep theirs
  ops::RopeTable local_;                          // of layers with a window, where these have one
  Tensor alibi_slopes_;
};

/// The token table, and that of learned positions; scaled and normed where the config says so.
class DecoderFront : public Block {
 public:
  DecoderFront(std::string name, const ModelConfig& config, const Numerics& numerics,
               const Embedding::Options& options);
  Flow forward(const Forward& forward, Flow) override;
  bool reads_weights_in_backward() const override { return norm_ != nullptr; }
  Parameter& table() { return embedding_.table(); }

 private:
  TensorParallel tensor_;
  float scale_;     // 1 = none
  double dropout_;  // behind the norm
  Embedding& embedding_;
  Norm* norm_;
};

class DecoderLayer : public Block {
 public:
  struct Options {
    DType compute = DType::f32;
    TensorParallel tensor = {};
    ExpertParallel experts = {};
    bool forget_norms = false;  ///< selective recomputation
    bool causal = true;
  };
  /// `config` and `positions` must outlive it.
  DecoderLayer(std::string name, const ModelConfig& config, std::int64_t layer,
               const PositionTables& positions, const Options& options);
  DecoderLayer(std::string, ModelConfig&&, std::int64_t, const PositionTables&, const Options&) = delete;
  Flow forward(const Forward& forward, Flow flow) override;
  CacheShape cache_shape() const override { return cache_; }

 private:
  Norm* declare_norm(const char* name, const ModelConfig& config, const Options& options, bool wanted);
  SelfAttention& declare_attention(const ModelConfig& config, std::int64_t layer, const Options& options);
  FeedForward& declare_mlp(const ModelConfig& config, std::int64_t layer, const Options& options);
  Var attend(const Forward& forward, const Var& x);
  Flow forward_parallel(const Forward& forward, const ResidualNorm& in);
  Flow forward_post(const Forward& forward, const Flow& flow);

  std::int64_t layer_;
  double dropout_;
  DType compute_;
  bool parallel_;
  CacheShape cache_;
  const PositionTables& positions_;
  // Null where the layer has none there.
  Norm* input_norm_;
  SelfAttention& attention_;
  Norm* attention_norm_;
  Norm* mlp_norm_;
  FeedForward& mlp_;
  Norm* behind_norm_;
};

/// The final norm, and the product with the head's weights or the table it is tied to.
class VocabHead : public Head {
 public:
  /// `table`: that of the embedding, where the head is tied and both are on this rank; else null.
  VocabHead(std::string name, const ModelConfig& config, const TensorParallel& tensor, DType compute,
            Parameter* table);
  Var forward(const Forward& forward, const Flow& flow, Model::Output output,
              const Tensor& upstream) override;
  const Parameter* borrowed() const override { return table_; }

 private:
  Parameter& declare_weight(const ModelConfig& config);

  TensorParallel tensor_;
  float softcap_;
  Norm& norm_;
  Parameter* table_;
  Parameter& weight_;
};

}  // namespace nn

class Decoder : public Stack {
 public:
  /// Errors: ConfigError for a sharding that does not fit.
  Decoder(const ModelConfig& config, const Numerics& numerics, const Sharding& sharding = {});

  std::int64_t vocab_size() const override { return config_.vocab_size; }
  std::int64_t max_positions() const override { return config_.max_positions; }
  std::int64_t position_limit() const override;
  void check_length(std::int64_t seq_length) const override;
  std::int64_t reserve_positions(const ExecCtx& ctx, std::int64_t positions) override {
    return positions_.reserve(ctx, positions, position_limit());
  }
  /// Not where the host reads how many tokens each expert gets.
  bool is_repeatable() const override { return !config_.num_experts; }
  std::vector<ExtraLossSpec> extra_losses() const override;
  bool takes_sequence_parts() const override { return true; }
  double flops_per_token(const SampleLengths& lengths) const override;
  void check_generates(std::int64_t length) const override;
  const ModelConfig& config() const { return config_; }

 private:
  void add_piece(const ModelPiece& piece);
  nn::Embedding::Options embedding_options() const;
  void prepare(const Forward& forward) override;

  ModelConfig config_;
  nn::PositionTables positions_;
  nn::DecoderFront* front_ = nullptr;
};

}  // namespace tessera
