#pragma once
/// Tensor and sequence parallelism: the differentiable collectives in conjugate pairs, and the Functions that
/// order them against their matrix products by hand (Shoeybi et al., "Megatron-LM"; Korthikanti et al.,
/// "Reducing activation recomputation in large transformer models"). With one tensor rank they send nothing.
///
/// Activations are [seq, batch, features], rows position-major. With sequence parallelism the parts between
/// the parallel linears hold seq / size() positions, those of rank r beginning at r * seq / size().

#include "tessera/autograd/functions.hpp"
#include "tessera/comm/communicator.hpp"

namespace tessera {

struct TensorParallel {
  Communicator* comm = nullptr;  ///< null = one rank
  bool sequence = false;         ///< shard norms, dropout and residual stream along the sequence
  /// Communication beside the product it depends on: 1 = none; n = a product's sum over ranks travels in n
  /// pieces, each while the next is multiplied, and each rank's positions are multiplied while the next one's
  /// come; 0 = as many pieces, at most 4, as are products large enough to fill a GPU.
  int chunks = 1;

  int size() const { return comm ? comm->size() : 1; }
  int rank() const { return comm ? comm->rank() : 0; }
  bool active() const { return size() > 1; }
  bool sharded_sequence() const { return sequence && active(); }
};

// Forward | backward.
/// identity | all-reduce
Var copy_to_tensor_ranks(const ExecCtx& ctx, const TensorParallel& tp, const Var& x);
/// all-reduce | identity
Var reduce_from_tensor_ranks(const ExecCtx& ctx, const TensorParallel& tp, const Var& x);
/// own positions | all-gather
Var scatter_sequence(const ExecCtx& ctx, const TensorParallel& tp, const Var& x);
/// all-gather of positions | reduce-scatter
Var gather_sequence(const ExecCtx& ctx, const TensorParallel& tp, const Var& x);
/// reduce-scatter of positions | all-gather
Var reduce_scatter_sequence(const ExecCtx& ctx, const TensorParallel& tp, const Var& x);
/// all-gather of the last dimension, in parts of `counts` features | own part
Var gather_features(const ExecCtx& ctx, const TensorParallel& tp, const Var& x,
                    std::span<const std::int64_t> counts);

/// The row_padding of a head: rows of logits start on cache-line boundaries whatever the vocabulary, because
/// the head is the largest product of all.
inline constexpr std::int64_t kHeadRowPadding = 32;

/// x weight^T + bias over a vocabulary whose rows tensor ranks share: all logits on every rank. x: [seq,
/// batch, in] (or [seq / size, batch, in]) to [seq, batch, vocab]. softcap c: c tanh(logit / c); 0 = as they
/// are.
Var vocab_logits(const ExecCtx& ctx, const TensorParallel& tp, const Var& x, Parameter& weight,
                 Parameter* bias = nullptr, float softcap = 0.0f);

/// The same without a gather: this rank's part_of the vocabulary.
Var own_vocab_logits(const ExecCtx& ctx, const TensorParallel& tp, const Var& x, Parameter& weight,
                     Parameter* bias = nullptr, float softcap = 0.0f);

/// Position 0 of x [seq (or seq / size), batch, c] on every rank: [batch, c] | its gradient, which every rank
/// has whole, on the rank that holds it
Var first_position(const ExecCtx& ctx, const TensorParallel& tp, const Var& x);

/// y = x weight^T + bias with this rank's rows of weight; bias may be null: [seq, batch, in] (or [seq / size,
/// batch, in]) to [seq, batch, out of this rank]. row_padding as in ops::linear. Backward: the all-reduce (or
/// reduce-scatter) of the input gradient runs during the product that makes the weight gradient; with
/// sequence parallelism the input is gathered again meanwhile instead of kept.
Var column_linear(const ExecCtx& ctx, const TensorParallel& tp, const Var& x, Parameter& weight,
                  Parameter* bias, std::int64_t row_padding = 1);
/// The same of one rank: x [..., in].
inline Var linear(const ExecCtx& ctx, const Var& x, Parameter& weight, Parameter* bias,
                  std::int64_t row_padding = 1) {
  return column_linear(ctx, {}, x, weight, bias, row_padding);
}

/// A linear's result, and an activation of it for activated_row_linear, which finds its gradient from `pre`:
/// y itself is on no tape.
struct LinearActivation {
  Var pre;
  Tensor y;
};
/// pre = column_linear(x), y = activation(pre); see ops::linear_with_activation_into. Without a tape no
/// backward needs pre: it is undefined.
LinearActivation column_linear_with_activation(const ExecCtx& ctx, const TensorParallel& tp, const Var& x,
                                               Parameter& weight, Parameter* bias, ops::ActivationKind kind);

/// y = sum over ranks of x weight^T, + bias: [seq, batch, in of this rank] to [seq (or seq / size), batch,
/// out]. weight holds this rank's columns, bias is whole on every rank. The gradient of bias is the whole one
/// on every rank.
Var row_linear(const ExecCtx& ctx, const TensorParallel& tp, const Var& x, Parameter& weight,
               Parameter* bias);
/// row_linear(activation(x)). The activated values are computed again for the weight gradient instead of
/// kept: they are as large as x, and one pass over them is little beside the product. `activated`: these
/// values, where they are there already (column_linear_with_activation).
Var activated_row_linear(const ExecCtx& ctx, const TensorParallel& tp, const Var& x, ops::ActivationKind kind,
                         Parameter& weight, Parameter* bias, Tensor activated = {});

/// RMSNorm of all queries of a position together, and of all keys: of a packed qkv [seq, batch, (heads + 2
/// kv_heads) * head_dim] of this rank's heads, whose weights [heads * head_dim] and [kv_heads * head_dim] are
/// this rank's too. Ranks add up their sums of squares. qkv is overwritten if this call is its last owner.
Var full_head_norm(const ExecCtx& ctx, const TensorParallel& tp, Var qkv, const HeadNormOptions& options);

struct EmbeddingSpec {
  DType out = DType::f32;  ///< of the result
  DropoutSpec dropout = {};
  std::int64_t padding_id = -1;  ///< token whose row of the table gets no gradient from here; -1 = none
};
/// dropout(table[tokens] + position_table[positions]), table split by rows (table.placement());
/// position_table, which may be null, is whole on every rank. tokens [seq, batch] and positions [seq * batch]
/// are whole; the result is [seq (or seq / size), batch, c]. With sequence parallelism position_table's
/// gradient is a part of the sum over ranks.
Var vocab_embedding(const ExecCtx& ctx, const TensorParallel& tp, const Var& tokens, Parameter& table,
                    const Tensor& positions, Parameter* position_table, const EmbeddingSpec& spec);
/// The same of one rank.
inline Var embedding(const ExecCtx& ctx, const Var& tokens, Parameter& table, const Tensor& positions,
                     Parameter* position_table, const EmbeddingSpec& spec) {
  return vocab_embedding(ctx, {}, tokens, table, positions, position_table, spec);
}

/// Per-token loss [seq * batch] fp32, whole on every rank, of logits split by columns: [seq * batch, this
/// rank's part of the vocabulary], part `placement` of the table that made them. labels whole.
Var vocab_cross_entropy(const ExecCtx& ctx, const TensorParallel& tp, Var logits, const Placement& vocabulary,
                        const Tensor& labels);
/// Per-token loss [rows] fp32 of logits [rows, vocab]; labels int32 [rows], -100 = ignored (loss 0). Backward
/// writes the gradient over the logits if this call is their last owner (std::move them in).
inline Var cross_entropy(const ExecCtx& ctx, Var logits, const Tensor& labels) {
  const std::int64_t n = logits.value().size(-1);
  return vocab_cross_entropy(ctx, {}, std::move(logits), Placement::replicated({n}), labels);
}

/// The rows of a batch whose labels count, some that do not among them. A head need not look at the others,
/// whose loss is 0 and gives no gradient.
struct LabelledRows {
  Tensor rows = {};    ///< [n] int32, rising; undefined = all rows
  Tensor labels = {};  ///< [n] int32
  Tensor places = {};  ///< int32 for every row of the batch: where it is in `rows`; -1 = not there

  explicit operator bool() const { return static_cast<bool>(rows); }
};

/// vocab_cross_entropy(column_linear(x, weight, bias)) a part of the rows at a time: logits never exist as a
/// whole. x [seq (or seq / size), batch, c]. On a tape the gradients are computed at once, chunk by chunk,
/// for `upstream` [rows], which backward must then be given as the gradient of this loss (the same tensor);
/// where that is undefined, logits are kept for whatever gradient comes. softcap: as in vocab_logits.
/// `labelled`: of `labels`, the same on all tensor ranks.
Var vocab_linear_cross_entropy(const ExecCtx& ctx, const TensorParallel& tp, const Var& x, Parameter& weight,
                               const Tensor& labels, const Tensor& upstream, Parameter* bias = nullptr,
                               float softcap = 0.0f, const LabelledRows& labelled = {});
/// The same of one rank: x [..., c].
inline Var linear_cross_entropy(const ExecCtx& ctx, const Var& x, Parameter& weight, const Tensor& labels,
                                const Tensor& upstream, Parameter* bias = nullptr) {
  return vocab_linear_cross_entropy(ctx, {}, x, weight, labels, upstream, bias);
}

}  // namespace tessera
