#include "parallel/arriving.hpp"
#include "tessera/ops/embedding.hpp"

namespace tessera {
namespace {

class VocabEmbedding final : public Function {
 public:
  VocabEmbedding(const TensorParallel& tp, Tensor tokens, Parameter& table, Tensor positions,
                 Parameter* position_table, const EmbeddingSpec& spec)
      : tp_(tp),
        tokens_(std::move(tokens)),
        positions_(std::move(positions)),
        table_(table),
        position_table_(position_table),
        spec_(spec) {}
  const char* name() const override { return "vocab_embedding"; }

  Tensors backward_input(const ExecCtx&, Tensors grads) override {
    dy_ = std::move(grads[0]);
    return {Tensor()};
  }

  void backward_weight(const ExecCtx& ctx) override {
    detail::Arriving whole(dy_, Pending());
    if (tp_.sharded_sequence() && table_.trained()) whole = detail::gather_positions(ctx, tp_, dy_);
    if (position_table_ && position_table_->trained()) add_position_gradient(ctx);
    if (table_.trained()) {
      ops::embedding_backward(ctx, tokens_, whole.take(ctx), table_.grad(), table_.next_beta(), spec_.dropout,
                              detail::first_row(tp_, table_.placement()), spec_.padding_id);
    }
  }

  std::vector<Parameter*> parameters() const override {
    std::vector<Parameter*> list;
    if (table_.trained()) list.push_back(&table_);
    if (position_table_ && position_table_->trained()) list.push_back(position_table_);
    return list;
  }

 private:
  /// Of the positions this rank has a gradient of.
  void add_position_gradient(const ExecCtx& ctx) const {
    Tensor positions = positions_;
    DropoutSpec dropout = spec_.dropout;
    if (tp_.sharded_sequence()) {
      dropout.position0 += tp_.rank() * dy_.size(0);
      const std::int64_t rows = dy_.numel() / dy_.size(-1);
      positions = positions.narrow(0, tp_.rank() * rows, rows);
    }
    ops::embedding_backward(ctx, positions, dy_, position_table_->grad(), position_table_->next_beta(),
                            dropout);
  }

  TensorParallel tp_;
  Tensor tokens_, positions_, dy_;
  Parameter& table_;
  Parameter* position_table_;
  EmbeddingSpec spec_;
};

}  // namespace

Var vocab_embedding(const ExecCtx& ctx, const TensorParallel& tp, const Var& tokens, Parameter& table,
                    const Tensor& positions, Parameter* position_table, const EmbeddingSpec& spec) {
  // The rank that has a token makes its whole row, the others zeros: the sum is the serial result, bit for
  // bit in any dtype.
  Tensor part = ops::embedding(ctx, tokens.value(), table.main(), position_table ? positions : Tensor(),
                               position_table ? position_table->main() : Tensor(),
                               {spec.out, spec.dropout, detail::first_row(tp, table.placement())});
  Tensor y = detail::sum_partial(ctx, tp, std::move(part)).take(ctx);
  return record({tokens}, std::move(y), [&] {
    return std::make_unique<VocabEmbedding>(tp, tokens.value(), table, positions, position_table, spec);
  });
}

}  // namespace tessera
