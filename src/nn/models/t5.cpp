/// T5: an encoder and a decoder that know positions by a learned bias on the distance of query and key alone.
/// One table of tokens serves both. Where the model is cut, what the first piece makes of it crosses the
/// boundaries: the decoder's embedded tokens up to its first layer, and each stack's bias up to its last.

#include "nn/models/t5.hpp"

#include <algorithm>
#include <cmath>

#include "nn/cached_attention.hpp"
#include "nn/models/cross_attention.hpp"
#include "nn/models/norm_options.hpp"
#include "nn/models/two_stacks.hpp"
#include "nn/own_positions.hpp"
#include "nn/relative_positions.hpp"
#include "tessera/base/model_math.hpp"
#include "tessera/nn/layers.hpp"

namespace tessera {
namespace nn {
namespace {

/// Initial weights are T5's own, times model.init_std / 0.02.
double init_factor(const ModelConfig& config) { return config.init_std / 0.02; }
double inverse_root(std::int64_t n) { return 1.0 / std::sqrt(static_cast<double>(n)); }

struct T5Options {
  Numerics numerics = {};
  TensorParallel tensor = {};
  bool forget_norms = false;  ///< selective recomputation
};

/// The bias of a stack: what each head adds to a score by the bucket of its distance.
class RelativeBias : public Module {
 public:
  RelativeBias(std::string name, const ModelConfig& config, const TensorParallel& tensor, bool both_sides,
               const RelativePositions& positions)
      : Module(std::move(name)),
        both_sides_(both_sides),
        positions_(positions),
        table_(parameter(
            "weight", placement(config, tensor),
            Init::normal(static_cast<float>(init_factor(config) * inverse_root(config.hidden_size))),
            {.reads_main = true})) {}

  /// [2 length - 1, heads of this rank] fp32, as ops::AttentionOptions::bias; of as many positions as a cache
  /// has, where there is one.
  Var forward(const Forward& f) {
    const std::int64_t length = f.cache != nullptr ? f.cache->cache->capacity : f.input.seq_length;
    const Tensor buckets = positions_.buckets(length, both_sides_);
    return embedding(f.exec, f.tape ? f.tape->input(buckets, false) : Var(buckets), table_, {}, nullptr,
                     {DType::f32});
  }

 private:
  static Placement placement(const ModelConfig& config, const TensorParallel& tensor) {
    const Shape whole{*config.relative_buckets, config.num_heads};
    return tensor.active() ? Placement::split(whole, 1, tensor.rank(), tensor.size())
                           : Placement::replicated(whole);
  }

  bool both_sides_;
  const RelativePositions& positions_;
  Parameter& table_;
};

/// Where the encoder begins. The decoder's tokens are embedded here too.
class T5Front : public Block {
 public:
  T5Front(std::string name, const ModelConfig& config, const T5Options& options, bool tied,
          const RelativePositions& positions)
      : Block(std::move(name)),
        tensor_(options.tensor),
        dropout_(embedding_dropout(config)),
        out_(options.numerics.residual),
        embedding_(submodule<Embedding>("embedding", Embedding::Options{.vocab_size = config.vocab_size,
                                                                        .size = config.hidden_size,
                                                                        .std = init_factor(config),
                                                                        .dropout = dropout_,
                                                                        .out = out_,
                                                                        .tensor = options.tensor,
                                                                        .tied = tied})),
        bias_(submodule<RelativeBias>("encoder.relative_attention_bias", config, options.tensor, true,
                                      positions)) {}

  Flow forward(const Forward& f, Flow flow) override {
    const TensorParallel tensor = f.shared(tensor_);
    flow.decoder_input = vocab_embedding(f.exec, tensor, f.tokens(), embedding_.table(), {}, nullptr,
                                         {out_, f.dropout("decoder.embedding", dropout_)});
    if (f.remembers_encoder()) return flow;
    const Forward encoder = f.of_encoder();
    for (const std::int64_t length : {f.input.seq_length, encoder.input.seq_length})
      TESSERA_CHECK(!tensor.sharded_sequence() || length % tensor.size() == 0, "sequences of ", length,
                    " positions are not shared evenly by ", tensor.size(),
                    " tensor ranks, which parallel.sequence needs");
    flow.residual = embedding_.forward(encoder);
    flow.bias = bias_.forward(encoder);
    return flow;
  }
  bool reads_weights_in_backward() const override { return false; }
  Parameter& table() { return embedding_.table(); }

 private:
  TensorParallel tensor_;
  double dropout_;
  DType out_;
  Embedding& embedding_;
  RelativeBias& bias_;
};

/// Where the encoder's stream becomes the memory, and the decoder's begins.
class T5DecoderFront : public Block {
 public:
  T5DecoderFront(std::string name, const ModelConfig& config, const T5Options& options,
                 const RelativePositions& positions)
      : Block(std::move(name)),
        tensor_(options.tensor),
        dropout_(config.dropout),
        norm_(submodule<Norm>("encoder.final_layernorm",
                              norm_options(config, options.tensor, options.numerics.compute))),
        bias_(submodule<RelativeBias>("decoder.relative_attention_bias", config, options.tensor, false,
                                      positions)) {}

  Flow forward(const Forward& f, Flow flow) override {
    if (!f.remembers_encoder()) {
      const Forward encoder = on_own_positions(f, tensor_).of_encoder();
      const Var last = norm_.forward(encoder, flow.residual, {}).y;
      flow.memory = dropout(f.exec, last, encoder.dropout(norm_.name(), dropout_));
    }
    flow.residual = std::exchange(flow.decoder_input, Var());
    flow.bias = bias_.forward(f);
    return flow;
  }

 private:
  TensorParallel tensor_;
  double dropout_;
  Norm& norm_;
  RelativeBias& bias_;
};

/// Normal initial weights of queries, keys and values, and of what attention's result is multiplied by.
double query_std(const ModelConfig& config) {
  return init_factor(config) * inverse_root(config.hidden_size) * inverse_root(config.head_dim);
}
double kv_std(const ModelConfig& config) { return init_factor(config) * inverse_root(config.hidden_size); }
double proj_std(const ModelConfig& config) {
  return init_factor(config) * inverse_root(config.num_heads * config.head_dim);
}

/// Scores are not scaled.
class T5SelfAttention : public Module {
 public:
  T5SelfAttention(std::string name, const ModelConfig& config, std::int64_t layer,
                  const TensorParallel& tensor, bool causal)
      : Module(std::move(name)),
        config_(config),
        layer_(layer),
        tensor_(tensor),
        heads_(head_share(config, tensor)),
        causal_(causal),
        proj_(submodule<Linear>("linear_proj", Linear::Options{.in = config.num_heads * config.head_dim,
                                                               .out = config.hidden_size,
                                                               .bias = false,
                                                               .std = proj_std(config),
                                                               .tensor = tensor,
                                                               .split = Linear::Split::row})),
        qkv_(submodule<Linear>("linear_qkv", qkv_options())) {}

  Var forward(const Forward& f, const Var& x, const Var& bias) {
    SelfAttentionOptions options{heads_.heads, heads_.kv_heads, config_.head_dim, {}, nullptr, {}};
    options.attention.scale = 1.0f;
    options.attention.causal = causal_;
    options.attention.key_begin = f.input.key_begin;
    options.attention.key_end = f.input.key_end;
    set_attention_dropout(f, config_, heads_, name(), f.input.seq_length, options.attention);
    Var qkv = qkv_.forward(f, x);
    if (f.cache != nullptr)
      return proj_.forward(f, cached_self_attention(f, layer_, qkv.take(), options, bias.value()));
    return proj_.forward(f, self_attention(f.exec, std::move(qkv), options, bias));
  }

 private:
  Linear::Options qkv_options() const {
    const std::int64_t width = config_.num_heads * config_.head_dim;
    Linear::Options options{config_.hidden_size,
                            width + 2 * config_.num_kv_heads * config_.head_dim,
                            false,
                            kv_std(config_),
                            tensor_,
                            Linear::Split::column,
                            qkv_rows(config_, heads_)};
    options.first_rows = width;
    options.first_std = query_std(config_);
    return options;
  }

  const ModelConfig& config_;
  std::int64_t layer_;
  TensorParallel tensor_;
  HeadShare heads_;
  bool causal_;
  Linear &proj_, &qkv_;
};

CrossAttention::Options cross_options(const ModelConfig& config, std::int64_t layer) {
  return {.layer = layer,
          .query_std = query_std(config),
          .kv_std = kv_std(config),
          .proj_std = proj_std(config),
          .scale = 1.0f};
}

/// Dropout is on the activated values too.
class T5Mlp : public Module {
 public:
  T5Mlp(std::string name, const ModelConfig& config, const TensorParallel& tensor)
      : Module(std::move(name)),
        config_(config),
        tensor_(tensor),
        activation_(activation_kind(config.activation)),
        fc1_(submodule<Linear>(
            "linear_fc1",
            Linear::Options{config.hidden_size,
                            config.ffn_hidden_size * (is_gated(config.activation) ? 2 : 1), false,
                            init_factor(config) * inverse_root(config.hidden_size), tensor,
                            Linear::Split::column, fc1_rows(config, tensor, config.ffn_hidden_size)})),
        fc2_(submodule<Linear>("linear_fc2",
                               Linear::Options{config.ffn_hidden_size,
                                               config.hidden_size,
                                               false,
                                               init_factor(config) * inverse_root(config.ffn_hidden_size),
                                               tensor,
                                               Linear::Split::row,
                                               {}})) {}

  Var forward(const Forward& f, const Var& x) {
    DropoutSpec drop = f.dropout(name() + ".activation", config_.dropout);
    if (!drop.active()) {
      if (ops::is_gated(activation_)) return fc2_.forward_activated(f, fc1_.forward(f, x), activation_);
      LinearActivation h = fc1_.forward_with_activation(f, x, activation_);
      return fc2_.forward_activated(f, h.pre, activation_, std::move(h.y));
    }
    // Of all positions, and of this rank's share of the features.
    drop.position0 = 0;
    drop.features = config_.ffn_hidden_size;
    drop.feature0 = config_.ffn_hidden_size / tensor_.size() * tensor_.rank();
    const Var h = activation(f.exec, fc1_.forward(f, x), activation_);
    return fc2_.forward(f, dropout(f.exec, h, drop));
  }

 private:
  const ModelConfig& config_;
  TensorParallel tensor_;
  ops::ActivationKind activation_;
  Linear &fc1_, &fc2_;
};

/// A layer of the encoder, or of the decoder, which reads the memory as well.
class T5Layer : public Block {
 public:
  /// `layer`: its number in the model.
  T5Layer(std::string name, const ModelConfig& config, std::int64_t layer, const T5Options& options,
          bool decodes)
      : Block(std::move(name)),
        dropout_(config.dropout),
        cache_(decodes ? two_stack_cache(config, options.tensor) : CacheShape()),
        input_norm_(submodule<Norm>("input_layernorm", norm(config, options))),
        attention_(submodule<T5SelfAttention>("self_attention", config, layer, options.tensor, decodes)),
        cross_norm_(decodes ? &submodule<Norm>("pre_cross_attn_layernorm", norm(config, options)) : nullptr),
        cross_(decodes ? &submodule<CrossAttention>("cross_attention", config, options.tensor,
                                                    cross_options(config, layer))
                       : nullptr),
        mlp_norm_(submodule<Norm>("pre_mlp_layernorm", norm(config, options))),
        mlp_(submodule<T5Mlp>("mlp", config, options.tensor)) {}

  Flow forward(const Forward& whole, Flow flow) override {
    if (cross_ == nullptr && whole.remembers_encoder()) return flow;
    const Forward f = cross_ != nullptr ? whole : whole.of_encoder();
    ResidualNorm x = input_norm_.forward(f, flow.residual, flow.branch, flow.dropout);
    Var branch = attention_.forward(f, x.y, flow.bias);
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
  static Norm::Options norm(const ModelConfig& config, const T5Options& options) {
    return norm_options(config, options.tensor, options.numerics.compute, options.forget_norms);
  }

  double dropout_;
  CacheShape cache_;
  Norm& input_norm_;
  T5SelfAttention& attention_;
  Norm* cross_norm_;
  CrossAttention* cross_;
  Norm& mlp_norm_;
  T5Mlp& mlp_;
};

/// The decoder's final norm, and the product with the head's weights or with the table of tokens.
class T5Head : public Head {
 public:
  /// `table`: of the front, where it is on this rank and the head is tied to it.
  T5Head(std::string name, const ModelConfig& config, const T5Options& options, Parameter* table)
      : Head(std::move(name)),
        dropout_(config.dropout),
        factor_(*config.scaled_head ? static_cast<float>(inverse_root(config.hidden_size)) : 1.0f),
        tensor_(options.tensor),
        norm_(submodule<Norm>("decoder.final_layernorm",
                              norm_options(config, options.tensor, options.numerics.compute))),
        table_(table),
        weight_(table != nullptr ? *table : declare_weight(config)) {}

  Var forward(const Forward& f, const Flow& flow, Model::Output output, const Tensor& upstream) override {
    const Var last = norm_.forward(f, flow.residual, flow.branch, flow.dropout).y;
    const Var kept = dropout(f.exec, last, f.dropout(norm_.name(), dropout_));
    const Var hidden = factor_ != 1.0f ? scale(f.exec, kept, factor_) : kept;
    if (output == Model::Output::losses)
      return vocab_linear_cross_entropy(f.exec, tensor_, hidden, weight_, f.input.labels, upstream, nullptr,
                                        0.0f, f.input.labelled);
    if (output == Model::Output::own_logits)
      return own_vocab_logits(f.exec, f.shared(tensor_), hidden, weight_);
    return vocab_logits(f.exec, tensor_, hidden, weight_);
  }
  const Parameter* borrowed() const override { return table_; }

 private:
  Parameter& declare_weight(const ModelConfig& config) {
    const Placement rows =
        Placement::split({config.vocab_size, config.hidden_size}, 0, tensor_.rank(), tensor_.size());
    const Init init = Init::normal(static_cast<float>(init_factor(config)));
    if (!config.tied_head) return parameter("output_layer.weight", rows, init);
    return parameter("embedding.word_embeddings.weight", rows, init,
                     {.reads_main = true, .tied = true, .counted = false});
  }

  double dropout_;
  float factor_;
  TensorParallel tensor_;
  Norm& norm_;
  Parameter* table_;
  Parameter& weight_;
};

}  // namespace
}  // namespace nn

namespace {

class T5 : public nn::TwoStacks {
 public:
  T5(const ModelConfig& config, const Numerics& numerics, const Sharding& given)
      : TwoStacks(config, numerics, given), positions_(config_) {
    check();
    for (const ModelPiece& piece : sharding().pieces) add_piece(piece);
  }

  std::int64_t position_limit() const override { return nn::RelativePositions::kMost; }
  void check_length(std::int64_t seq_length) const override {
    TESSERA_CHECK(seq_length <= position_limit(), "a sequence of ", seq_length, " tokens is longer than ",
                  position_limit(), " positions");
  }
  std::int64_t reserve_positions(const ExecCtx& ctx, std::int64_t positions) override {
    check_length(positions);
    return positions_.reserve(ctx, positions);
  }

 protected:
  std::vector<Port> flow_before(std::int64_t layer, const MicroBatchSize& size) const override {
    const std::int64_t encoder = encoder_layers();
    if (layer == config_.num_layers) return {stream("residual", size)};
    if (layer <= encoder && remembers(size)) return {stream("decoder_input", size)};
    std::vector<Port> ports = {stream("residual", layer > encoder ? size : encoded(size))};
    if (layer > encoder && !remembers(size)) {
      ports.push_back(stream("memory", encoded(size)));
      ports.back().dtype = numerics().compute;
    } else if (layer <= encoder) {
      ports.push_back(stream("decoder_input", size));
    }
    const std::int64_t own = size.generates ? size.capacity : size.seq_length;
    const std::int64_t length = layer > encoder ? own : size.encoder_seq_length;
    const std::int64_t heads = config_.num_heads / sharding().tensor.size();
    // The decoder's front makes another one.
    const std::int64_t distances = std::max<std::int64_t>(0, 2 * length - 1);  // empty passes have none
    if (layer != encoder) ports.push_back({Shape{distances, heads}, DType::f32, "bias"});
    return ports;
  }
  void prepare(const Forward& forward) override { positions_.make(forward.exec); }

 private:
  void check() const {
    const auto need = [](bool holds, const char* what) { TESSERA_ENSURE(ConfigError, holds, "a T5 ", what); };
    const ModelConfig& c = config_;
    need(c.position_embedding == PositionKind::relative, "has relative positions");
    need(c.norm == NormStyle::rmsnorm, "has RMSNorm");
    need(!c.qkv_bias && !c.linear_bias && !has_proj_bias(c), "has no biases in its products");
    need(!*c.scaled_head || c.tied_head, "whose head is scaled has it tied to its embedding");
    check_stacks("a T5");
    const int ranks = sharding().tensor.size();
    TESSERA_ENSURE(ConfigError, c.dropout == 0.0 || ranks == 1 || c.ffn_hidden_size / ranks % 4 == 0,
                   "model.ffn_hidden_size (", c.ffn_hidden_size, ") shared by ", ranks,
                   " tensor ranks is no multiple of 4 on each, which dropout inside T5's MLP needs");
  }

  void add_piece(const ModelPiece& piece) {
    begin_piece();
    const nn::T5Options options{numerics(), sharding().tensor,
                                sharding().recompute.what == Recompute::selective};
    const std::int64_t encoder = encoder_layers();
    if (piece.embedding)
      front_ = &add_front<nn::T5Front>("", config_, options, config_.tied_head && !holds_head(), positions_);
    for (std::int64_t i = piece.first_layer; i < piece.first_layer + piece.num_layers; ++i) {
      if (i == encoder) add_front<nn::T5DecoderFront>("", config_, options, positions_);
      add_layer<nn::T5Layer>(layer_name(i), config_, i, options, i >= encoder);
    }
    if (!piece.head) return;
    Parameter* table = config_.tied_head && front_ != nullptr ? &front_->table() : nullptr;
    add_head<nn::T5Head>("", config_, options, table);
  }

  nn::RelativePositions positions_;
  nn::T5Front* front_ = nullptr;
};

}  // namespace

std::unique_ptr<Model> build_t5(const ModelConfig& config, const Numerics& numerics,
                                const Sharding& sharding) {
  return std::make_unique<T5>(config, numerics, sharding);
}

}  // namespace tessera
