#pragma once
#include "tessera/nn/forward.hpp"
#include "tessera/nn/module.hpp"
#include "tessera/tensor/port.hpp"

namespace tessera {

struct SampleLengths;  // base/config.hpp

/// In which order a piece reads units of a model (Model::units), by number; those of one entry together.
struct UnitOrder {
  std::vector<std::vector<std::size_t>> forward, backward;
  /// Of weight gradients that were put off: what is computed again for them; of that only what kernels read
  /// in fp32 (ParameterTraits::reads_main).
  std::vector<std::vector<std::size_t>> weight_gradient;
};

/// What the engine trains: a module that turns tokens into logits. A model of your own needs a constructor
/// that declares its parts and this one function; backward follows from the functions it calls.
class Model : public Module {
 public:
  /// What the last piece of a model returns; sample_logits: [batch, sample_classes()], of a head for samples
  /// beside that for tokens; own_logits: this tensor rank's columns of logits, its part_of the vocabulary.
  enum class Output { logits, losses, sample_logits, own_logits };

  Model() : Module("") {}
  /// logits [seq_length * batch, vocab_size()], rows position-major as in MicroBatch.
  virtual Var forward(const Forward& forward) = 0;
  /// Per-token losses [seq_length * batch] of forward.input.labels. `upstream`, the gradient these losses
  /// will get, is known beforehand when the engine's own mean loss is trained: a model may use it to fuse
  /// head and loss. Undefined where it is not known.
  virtual Var loss(const Forward& forward, const Tensor& upstream);

  /// Losses that are trained besides that of the tokens, in all pieces of the model: the same on every rank.
  /// A piece computes its own and gives them to Forward::add_loss, in evaluations too. Each is divided by its
  /// count over the whole batch, and added to the mean loss of the tokens times its weight.
  virtual std::vector<ExtraLossSpec> extra_losses() const { return {}; }

  /// Pieces of the model that this rank holds; more than one, or not all there are, in a pipeline.
  virtual int num_pieces() const { return 1; }
  /// Runs one of them. `inputs`: what the piece before returned, one for each port of inputs(); empty for the
  /// first piece of the model. Returns what the next piece gets, one for each port of outputs(); the last
  /// piece returns `output` alone. What a piece only passes on is returned as it came. The default is one
  /// piece that is the whole model.
  virtual std::vector<Var> run_piece(const Forward& forward, int piece, const std::vector<Var>& inputs,
                                     Output output, const Tensor& upstream);
  /// Whether this rank's piece `piece` is the last of the model: it returns losses or logits.
  virtual bool is_last(int piece) const {
    (void)piece;
    return true;
  }
  /// Pieces of this rank that use a parameter: a tied table may be used by two.
  virtual int pieces_using(const Parameter& parameter) const {
    (void)parameter;
    return 1;
  }
  /// Parameters that are read together: a layer's, the embedding's, the head's. Where data ranks share
  /// weights out (parallel.zero_stage 3) they are gathered unit by unit. Every parameter is in one. The
  /// default is one unit of all.
  virtual std::vector<std::vector<Parameter*>> units();
  /// In which order a piece reads them. A pass that reads others, or in another order, throws.
  virtual UnitOrder unit_order(int piece);
  /// What crosses the boundary before this rank's piece `piece` (its gradients go back there), and the one
  /// behind it; empty where the model begins or ends. The pieces on both sides of a boundary say the same.
  /// Errors: InvalidArgument if the model cannot be cut.
  virtual std::vector<Port> inputs(int piece, const MicroBatchSize& size) const;
  virtual std::vector<Port> outputs(int piece, const MicroBatchSize& size) const;

  virtual std::int64_t vocab_size() const = 0;
  /// Token types that Batch::token_types may name; 0 = the model reads none, and a batch with some is
  /// refused.
  virtual std::int64_t token_types() const { return 0; }
  /// Classes that Batch::sample_labels may name; 0 likewise.
  virtual std::int64_t sample_classes() const { return 0; }
  /// Whether an encoder reads Batch::encoder_tokens beside the decoder's tokens; a batch must then have some.
  virtual bool reads_encoder_tokens() const { return false; }
  /// Whether it has no head for tokens: its logits are [batch, sample_classes()], and its losses, [batch], of
  /// Batch::sample_labels.
  virtual bool reads_whole_samples() const { return false; }
  /// Whether a pass may be about a part of the positions (Forward::context): then its attention alone looks
  /// at others.
  virtual bool takes_sequence_parts() const { return false; }
  /// Positions the model was made for: generation ends there.
  virtual std::int64_t max_positions() const = 0;
  /// Positions it can compute, at least max_positions(): more where they are not learned.
  virtual std::int64_t position_limit() const { return max_positions(); }
  /// Errors: InvalidArgument for a sequence longer than the model takes.
  virtual void check_length(std::int64_t seq_length) const;
  /// Called before a pass whose positions are below `positions`, outside of recorded work. Returns the size
  /// of what it keeps for them: work recorded at another size must be recorded again.
  virtual std::int64_t reserve_positions(const ExecCtx& ctx, std::int64_t positions) {
    (void)ctx, (void)positions;
    return 0;
  }
  /// Whether a pass can be launched again as it was recorded: of what changes between two steps it reads the
  /// micro-batch's tensors, weights and gradients, Forward::random and Forward::dropout, and nothing on the
  /// host. The default is a model that may read anything.
  virtual bool is_repeatable() const { return false; }
  /// Model FLOPs of one trained token in samples of these lengths, forward and backward (6 per matmul weight
  /// plus attention, causal attention counted once), with its share of what an encoder takes; 0 = unknown.
  virtual double flops_per_token(const SampleLengths& lengths) const {
    (void)lengths;
    return 0.0;
  }
  /// A cache of zeros for this rank's pieces: pages for `capacity` positions of each row, whose order the
  /// table has; `encoder_capacity`: positions of what an encoder reads. With a capacity of 0 the pools are
  /// empty, for the caller to give them pages. Errors: as check_generates(0).
  virtual KvCache make_cache(const ExecCtx& ctx, std::int64_t rows, std::int64_t capacity,
                             std::int64_t encoder_capacity = 0) const;
  /// Whether the model writes texts of so many tokens, prompts included. Errors: InvalidArgument, the same on
  /// every rank, saying why not.
  virtual void check_generates(std::int64_t length) const;
};

}  // namespace tessera
