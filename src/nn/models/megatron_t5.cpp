/// Megatron-LM's T5: an encoder and a decoder of its own kind of layers, with one table of tokens and one of
/// learned positions for both. Where the model is cut, the decoder's embedded tokens cross the boundaries up
/// to its first layer, and the encoder's result from there on.

#include <cmath>

#include "nn/models/cross_attention.hpp"
#include "nn/models/norm_options.hpp"
#include "nn/models/t5.hpp"
#include "nn/models/two_stacks.hpp"
#include "nn/own_positions.hpp"
#include "tessera/base/model_math.hpp"
#include "tessera/nn/layers.hpp"
#include "tessera/nn/stack.hpp"

namespace tessera {
namespace nn {
namespace {

struct MegatronT5Options {
  Numerics numerics = {};
  TensorParallel tensor = {};
  bool forget_norms = false;  ///< selective recomputation
};

/// Where the encoder begins. The decoder's tokens are embedded here too.
class MegatronT5Front : public Block {
 public:
  MegatronT5Front(std::string name, const ModelConfig& config, const MegatronT5Options& options, bool tied)
      : Block(std::move(name)),
        tensor_(options.tensor),
        dropout_(embedding_dropout(config)),
        embedding_(submodule<Embedding>("embedding", Embedding::Options{.vocab_size = config.vocab_size,
                                                                        .size = config.hidden_size,
                                                                        .max_positions = config.max_positions,
                                                                        .std = config.init_std,
                                                                        .out = options.numerics.residual,
                                                                        .tensor = options.tensor,
                                                                        .tied = tied})) {}

  Flow forward(const Forward& f, Flow flow) override {
    flow.decoder_input = embedded(f, "decoder.embedding");
    if (f.remembers_encoder()) return flow;
    const Forward encoder = f.of_encoder();
    const TensorParallel tensor = f.shared(tensor_);
    for (const std::int64_t length : {f.input.seq_length, encoder.input.seq_length})
      TESSERA_CHECK(!tensor.sharded_sequence() || length % tensor.size() == 0, "sequences of ", length,
                    " positions are not shared evenly by ", tensor.size(),
                    " tensor ranks, which parallel.sequence needs");
    flow.residual = embedded(encoder, embedding_.name());
    return flow;
  }
  Parameter& table() { return embedding_.table(); }

 private:
  Var embedded(const Forward& f, const std::string& site) {
    return dropout(f.exec, embedding_.forward(f), on_own_positions(f, tensor_).dropout(site, dropout_));
  }

  TensorParallel tensor_;
  double dropout_;
  Embedding& embedding_;
};

/// Where the encoder's stream becomes the memory, and the decoder's begins.
class MegatronT5DecoderFront : public Block {
 public:
  MegatronT5DecoderFront(std::string name, const ModelConfig& config, const MegatronT5Options& options)
      : Block(std::move(name)),
        norm_(submodule<Norm>("encoder.final_layernorm",
                              norm_options(config, options.tensor, options.numerics.compute))) {}

  Flow forward(const Forward& f, Flow flow) override {
    if (!f.remembers_encoder()) flow.memory = norm_.forward(f.of_encoder(), flow.residual, {}).y;
    flow.residual = std::exchange(flow.decoder_input, Var());
    return flow;
  }

 private:
  Norm& norm_;
};

/// A layer of the encoder, or of the decoder, which reads the memory as well.
class MegatronT5Layer : public Block {
 public:
  MegatronT5Layer(std::string name, const ModelConfig& config, std::int64_t layer,
                  const MegatronT5Options& options, bool decodes)
      : Block(std::move(name)),
        dropout_(config.dropout),
        cache_(decodes ? two_stack_cache(config, options.tensor) : CacheShape()),
        input_norm_(submodule<Norm>("input_layernorm", norm(config, options))),
        attention_(submodule<SelfAttention>("self_attention", config, layer, options.tensor, decodes)),
        cross_norm_(decodes ? &submodule<Norm>("pre_cross_attn_layernorm", norm(config, options)) : nullptr),
        cross_(decodes ? &submodule<CrossAttention>("cross_attention", config, options.tensor,
                                                    cross(config, layer))
                       : nullptr),
        mlp_norm_(submodule<Norm>("pre_mlp_layernorm", norm(config, options))),
        mlp_(submodule<Mlp>("mlp", config, options.tensor)) {}

  Flow forward(const Forward& whole, Flow flow) override {
    if (cross_ == nullptr && whole.remembers_encoder()) return flow;
    const Forward f = cross_ != nullptr ? whole : whole.of_encoder();
    ResidualNorm x = input_norm_.forward(f, flow.residual, flow.branch, flow.dropout);
    Var branch = attention_.forward(f, x.y, nullptr, {});
    DropoutSpec drop = f.dropout(attention_.name(), dropout_);
    if (cross_ != nullptr) {
      x = cross_norm_->forward(f, x.residual, branch, drop);
      branch = cross_->forward(f, x.y, flow.memory);
      drop = f.dropout(cross_->name(), dropout_);
    }
    x = mlp_norm_.forward(f, x.residual, branch, drop);
    flow.residual = x.residual;
    flow.branch = mlp_.forward(f, x.y);
    flow.dropout = f.dropout(mlp_.name(), dropout_);
    return flow;
  }
  CacheShape cache_shape() const override { return cache_; }

 private:
  static Norm::Options norm(const ModelConfig& config, const MegatronT5Options& options) {
    return norm_options(config, options.tensor, options.numerics.compute, options.forget_norms);
  }
  static CrossAttention::Options cross(const ModelConfig& config, std::int64_t layer) {
    return {.layer = layer,
            .query_std = config.init_std,
            .kv_std = config.init_std,
            .proj_std = config.init_std / std::sqrt(2.0 * static_cast<double>(config.num_layers)),
            .bias = config.qkv_bias,
            .proj_bias = has_proj_bias(config)};
  }

  double dropout_;
  CacheShape cache_;
  Norm& input_norm_;
  SelfAttention& attention_;
  Norm* cross_norm_;
  CrossAttention* cross_;
  Norm& mlp_norm_;
  Mlp& mlp_;
};

/// The decoder's final norm, and the product with the table of tokens, with a bias.
class MegatronT5Head : public Head {
 public:
  /// `table`: of the front, where it is on this rank.
  MegatronT5Head(std::string name, const ModelConfig& config, const MegatronT5Options& options,
                 Parameter* table)
      : Head(std::move(name)),
        tensor_(options.tensor),
        norm_(submodule<Norm>("decoder.final_layernorm",
                              norm_options(config, options.tensor, options.numerics.compute))),
        bias_(parameter("output_layer.bias", rows({config.vocab_size}), Init::zeros())),
        table_(table),
        weight_(table != nullptr ? *table
                                 : parameter("embedding.word_embeddings.weight",
                                             rows({config.vocab_size, config.hidden_size}),
                                             Init::normal(static_cast<float>(config.init_std)),
                                             {.reads_main = true, .tied = true, .counted = false})) {}

  Var forward(const Forward& f, const Flow& flow, Model::Output output, const Tensor& upstream) override {
    const Var last = norm_.forward(f, flow.residual, flow.branch, flow.dropout).y;
    if (output == Model::Output::losses)
      return vocab_linear_cross_entropy(f.exec, tensor_, last, weight_, f.input.labels, upstream, &bias_,
                                        0.0f, f.input.labelled);
    if (output == Model::Output::own_logits)
      return own_vocab_logits(f.exec, f.shared(tensor_), last, weight_, &bias_);
    return vocab_logits(f.exec, tensor_, last, weight_, &bias_);
  }
  const Parameter* borrowed() const override { return table_; }

 private:
  Placement rows(const Shape& shape) const {
    return Placement::split(shape, 0, tensor_.rank(), tensor_.size());
  }

  TensorParallel tensor_;
  Norm& norm_;
  Parameter& bias_;
  Parameter* table_;
  Parameter& weight_;
};

}  // namespace
}  // namespace nn

namespace {

class MegatronT5 : public nn::TwoStacks {
 public:
  MegatronT5(const ModelConfig& config, const Numerics& numerics, const Sharding& given)
      : TwoStacks(config, numerics, given) {
    check();
    for (const ModelPiece& piece : sharding().pieces) add_piece(piece);
  }

 protected:
  std::vector<Port> flow_before(std::int64_t layer, const MicroBatchSize& size) const override {
    const std::int64_t encoder = encoder_layers();
    if (layer == config_.num_layers) return {stream("residual", size)};
    if (remembers(size)) return {stream(layer <= encoder ? "decoder_input" : "residual", size)};
    if (layer <= encoder) return {stream("residual", encoded(size)), stream("decoder_input", size)};
    std::vector<Port> ports = {stream("residual", size), stream("memory", encoded(size))};
    ports.back().dtype = numerics().compute;
    return ports;
  }

 private:
  void check() const {
    const auto need = [](bool holds, const char* what) {
      TESSERA_ENSURE(ConfigError, holds, "Megatron's T5 ", what);
    };
    const ModelConfig& c = config_;
    need(c.position_embedding == PositionKind::learned, "has learned positions");
    need(c.tied_head, "has its head tied to its embedding");
    check_stacks("Megatron's T5");
  }

  void add_piece(const ModelPiece& piece) {
    begin_piece();
    const nn::MegatronT5Options options{numerics(), sharding().tensor,
                                        sharding().recompute.what == Recompute::selective};
    const std::int64_t encoder = encoder_layers();
    if (piece.embedding) front_ = &add_front<nn::MegatronT5Front>("", config_, options, !holds_head());
    for (std::int64_t i = piece.first_layer; i < piece.first_layer + piece.num_layers; ++i) {
      if (i == encoder) add_front<nn::MegatronT5DecoderFront>("", config_, options);
      add_layer<nn::MegatronT5Layer>(layer_name(i), config_, i, options, i >= encoder);
    }
    if (piece.head)
      add_head<nn::MegatronT5Head>("", config_, options, front_ != nullptr ? &front_->table() : nullptr);
  }

  nn::MegatronT5Front* front_ = nullptr;
};

}  // namespace

std::unique_ptr<Model> build_megatron_t5(const ModelConfig& config, const Numerics& numerics,
                                         const Sharding& sharding) {
  return std::make_unique<MegatronT5>(config, numerics, sharding);
}

}  // namespace tessera
