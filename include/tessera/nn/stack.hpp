#pragma once
/// Models as lists of blocks. A stack is cut into pieces for a pipeline, recomputed, tied and cached whatever
/// its blocks are.

#include "tessera/nn/model.hpp"
#include "tessera/nn/sharding.hpp"

namespace tessera {

/// Dtypes a model computes in.
struct Numerics {
  DType compute = DType::f32;   ///< weights and activations as kernels read them
  DType residual = DType::f32;  ///< the residual stream
};
/// bf16 and fp16 keep the residual stream in fp32 if the config says so.
Numerics numerics_of(const TrainingConfig& training);

/// What flows from block to block. A block changes what it is about and passes the rest on.
struct Flow {
  Var residual;         ///< the residual stream, [seq, batch, hidden]; undefined before the first block
  Var branch;           ///< what the next norm adds to it; undefined = nothing
  DropoutSpec dropout;  ///< on branch
  Var memory = {};      ///< an encoder's result, for blocks of a decoder to read; undefined = none
  Var bias =
      {};  ///< on scores, by distance (ops::AttentionOptions::bias), for the blocks of one stack of layers
  Var decoder_input = {};  ///< what a decoder begins with, until it does
};
/// residual + dropout(branch): the flow as one tensor, as it leaves a piece or enters a recomputed segment.
Var fold(const ExecCtx& ctx, const Flow& flow);

/// One part of a stack.
class Block : public Module {
 public:
  using Module::Module;
  /// What it adds to an extra loss goes to Forward::add_loss. Errors of the stack: InvalidArgument for a
  /// memory that came in and does not go out.
  virtual Flow forward(const Forward& forward, Flow flow) = 0;

  /// What a block keeps of each position while text is generated; 0 heads = nothing.
  struct CacheShape {
    std::int64_t kv_heads = 0, head_dim = 0;
    bool reads_encoder = false;  ///< and as much of what an encoder made
  };
  virtual CacheShape cache_shape() const { return {}; }
  /// Whether its backward reads weights; that of a lookup in tables does not.
  virtual bool reads_weights_in_backward() const { return true; }
};

/// What ends a stack: from the residual stream to logits or losses.
class Head : public Module {
 public:
  using Module::Module;
  /// Logits [seq_length * batch, vocabulary], or losses [seq_length * batch] as Model::loss returns them.
  virtual Var forward(const Forward& forward, const Flow& flow, Model::Output output,
                      const Tensor& upstream) = 0;
  /// A block's parameter that it uses as well: a tied table on the same rank. Null = none. The same at any
  /// time.
  virtual const Parameter* borrowed() const { return nullptr; }
};

/// A model made of blocks. A derived class's constructor declares, piece by piece of sharding(), the parts
/// that this rank holds: begin_piece(), then add_front(), add_layer() and add_head() in the model's order.
class Stack : public Model {
 public:
  /// All pieces, one after the other; for ranks that hold the whole model.
  Var forward(const Forward& forward) override;
  Var loss(const Forward& forward, const Tensor& upstream) override;
  int num_pieces() const override { return static_cast<int>(pieces_.size()); }
  std::vector<Var> run_piece(const Forward& forward, int piece, const std::vector<Var>& inputs, Output output,
                             const Tensor& upstream) override;
  bool is_last(int piece) const override { return piece_at(piece).head != nullptr; }
  int pieces_using(const Parameter& parameter) const override { return &parameter == shared_ ? 2 : 1; }
  /// Each block and the head; what belongs to none of them is a unit that every pass reads throughout.
  std::vector<std::vector<Parameter*>> units() override;
  UnitOrder unit_order(int piece) override;
  std::vector<Port> inputs(int piece, const MicroBatchSize& size) const override;
  std::vector<Port> outputs(int piece, const MicroBatchSize& size) const override;
  KvCache make_cache(const ExecCtx& ctx, std::int64_t rows, std::int64_t capacity,
                     std::int64_t encoder_capacity = 0) const override;
  void check_generates(std::int64_t length) const override;

 protected:
  /// `sharding` without pieces: one piece of `num_layers` layers with both ends.
  Stack(std::int64_t hidden_size, std::int64_t num_layers, const Numerics& numerics,
        const Sharding& sharding);

  const Sharding& sharding() const { return sharding_; }
  const Numerics& numerics() const { return numerics_; }
  /// Whether one of this rank's pieces ends the model.
  bool holds_head() const;

  /// What flows into layer `layer` of the model where a boundary lies before it (behind the last one: into
  /// the head), the branch added; where a front stands before that layer, into this front. Names are those of
  /// Flow: "residual", "memory", "bias", "decoder_input". The default is one residual stream of the
  /// micro-batch's length.
  virtual std::vector<Port> flow_before(std::int64_t layer, const MicroBatchSize& size) const;
  /// A value [seq, batch, hidden_size] in the residual stream's dtype, or this rank's positions of it.
  Port stream(const std::string& name, const MicroBatchSize& size) const;

  void begin_piece() { pieces_.emplace_back(); }
  /// The block B(`name`, args...) that turns tokens into a residual stream: before the first layer, or once
  /// more in the middle, as a decoder's behind an encoder. It gets the flow so far, and is not recomputed.
  template <typename B, typename... Args>
  B& add_front(const std::string& name, Args&&... args) {
    B& block = submodule<B>(name, std::forward<Args>(args)...);
    pieces_.back().runs.push_back({&block, {}});
    return block;
  }
  /// A block that sharding().recompute may compute again in backward.
  template <typename B, typename... Args>
  B& add_layer(const std::string& name, Args&&... args) {
    B& block = submodule<B>(name, std::forward<Args>(args)...);
    if (pieces_.back().runs.empty()) pieces_.back().runs.emplace_back();
    pieces_.back().runs.back().layers.push_back(&block);
    return block;
  }
  template <typename H, typename... Args>
  H& add_head(const std::string& name, Args&&... args) {
    H& head = submodule<H>(name, std::forward<Args>(args)...);
    pieces_.back().head = &head;
    settle_shared();
    return head;
  }

  /// Called before each pass: what depends on the context and not on weights is made here, once.
  virtual void prepare(const Forward& forward) { (void)forward; }

 private:
  /// Layers in a row, and the front before them or null.
  struct Run {
    Block* front = nullptr;
    std::vector<Block*> layers = {};
  };
  struct Piece {
    std::vector<Run> runs;
    Head* head = nullptr;
  };

  /// Blocks and heads, as they were declared.
  std::vector<Module*> parts() const;
  /// A group of layers that are computed again together, from layer `first` on.
  std::size_t segment(std::size_t first, std::size_t count) const;
  const Piece& piece_at(int index) const { return pieces_.at(static_cast<std::size_t>(index)); }
  const ModelPiece& place_of(int index) const { return sharding_.pieces.at(static_cast<std::size_t>(index)); }
  /// Whether the last head's borrowed parameter belongs to another piece.
  void settle_shared();
  /// The rows of the flow that a pass of generation asks the head for.
  static Flow last_rows(const Forward& forward, const Flow& flow);
  Var run_all(const Forward& forward, Output output, const Tensor& upstream);
  Flow run_layers(const Forward& forward, const std::vector<Block*>& layers, Flow flow);
  /// Layers [first, first + count), computed again in backward.
  Flow run_recomputed(const Forward& forward, const std::vector<Block*>& layers, std::size_t first,
                      std::size_t count, Flow flow);

  std::int64_t hidden_size_;
  Numerics numerics_;
  Sharding sharding_;
  std::vector<Piece> pieces_;
  const Parameter* shared_ = nullptr;  // of two pieces
};

}  // namespace tessera
