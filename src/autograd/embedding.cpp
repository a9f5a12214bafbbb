#include "tessera/ops/embedding.hpp"

#include "tessera/autograd/functions.hpp"

namespace tessera {
namespace {

class Embedding final : public Function {
 public:
  Embedding(Tensor tokens, Parameter& table, Tensor positions, Parameter* position_table,
            const EmbeddingSpec& spec)
      : tokens_(std::move(tokens)),
        positions_(std::move(positions)),
        table_(table),
        position_table_(position_table),
        spec_(spec) {}
  const char* name() const override { return "embedding"; }

  Tensors backward_input(const ExecCtx&, Tensors grads) override {
    dy_ = std::move(grads[0]);
    return {Tensor()};
  }

  void backward_weight(const ExecCtx& ctx) override {
    if (table_.trained()) {
      ops::embedding_backward(ctx, tokens_, dy_, table_.grad(), table_.next_beta(), spec_.dropout, 0,
                              spec_.padding_id);
    }
    if (position_table_ && position_table_->trained()) {
      ops::embedding_backward(ctx, positions_, dy_, position_table_->grad(), position_table_->next_beta(),
                              spec_.dropout);
    }
  }

  std::vector<Parameter*> parameters() const override {
    std::vector<Parameter*> list;
    if (table_.trained()) list.push_back(&table_);
    if (position_table_ && position_table_->trained()) list.push_back(position_table_);
    return list;
  }

 private:
  Tensor tokens_, positions_, dy_;
  Parameter& table_;
  Parameter* position_table_;
  EmbeddingSpec spec_;
};

}  // namespace

Var embedding(const ExecCtx& ctx, const Var& tokens, Parameter& table, const Tensor& positions,
              Parameter* position_table, const EmbeddingSpec& spec) {
  Tensor y = ops::embedding(ctx, tokens.value(), table.main(), position_table ? positions : Tensor(),
                            position_table ? position_table->main() : Tensor(), {spec.out, spec.dropout});
  return record({tokens}, std::move(y), [&] {
    return std::make_unique<Embedding>(tokens.value(), table, positions, position_table, spec);
  });
}

}  // namespace tessera
