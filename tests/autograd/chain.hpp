#pragma once
/// Blocks one after the other, under each way of computing again what backward needs.

#include <algorithm>
#include <map>

#include "tessera/autograd/recompute.hpp"
#include "tests/autograd/block.hpp"

namespace tessera::test {

/// Values of tensors by name, as exact floats.
using Values = std::map<std::string, std::vector<float>>;
using Weights = Tape::WeightGradients;

/// How a run computes again what it needs.
struct Plan {
  bool forget = false;
  std::size_t group = 0;  ///< blocks per recomputed part, 0 = none
  bool nested = false;    ///< each block of a group is recomputed by itself, too
  Weights weights = Weights::immediate;
  Communicator* partition = nullptr;
};

/// Blocks, a norm, and a head that shares its weight with the first block's projection.
class Chain {
 public:
  Chain(const ExecCtx& ctx, BlockSizes sizes, std::size_t count, const Plan& plan)
      : ctx_(ctx), sizes_(sizes), plan_(plan) {
    sizes_.forget = plan.forget;
    for (std::size_t i = 0; i < count; ++i) {
      std::string name = "block";
      name += std::to_string(i);
      blocks_.push_back(std::make_unique<Block>(ctx, name, sizes_, static_cast<unsigned>(100 * i + 1)));
    }
    norm_ = make_weight(ctx, "norm.weight", {sizes.width()}, 991, DType::f32);
  }

  Parameter& head() const { return *blocks_[0]->parameters()[4]; }
  std::vector<Parameter*> parameters() const {
    std::vector<Parameter*> list{norm_.get()};
    for (const auto& block : blocks_) {
      for (Parameter* p : block->parameters()) list.push_back(p);
    }
    return list;
  }

  Var forward(const Var& x) const {
    Stream stream{x, {}};
    for (std::size_t i = 0; i < blocks_.size();) {
      const std::size_t end = std::min(blocks_.size(), i + std::max<std::size_t>(1, plan_.group));
      stream =
          plan_.group == 0 ? blocks_[i]->forward(ctx_, stream) : recomputed(i, end, stream, plan_.nested);
      i = end;
    }
    const ops::NormOptions norm{.rms = true, .eps = 1e-5f, .out = sizes_.compute};
    const Var y = add_norm(ctx_, stream.residual, stream.branch, *norm_, nullptr, norm, {}, plan_.forget).y;
    return linear(ctx_, y, head(), nullptr);
  }

  /// Output and all gradients of one forward and backward.
  Values run() {
    Values values;
    ready.clear();
    for (Parameter* p : parameters()) p->clear_grad();
    Tape tape;
    tape.on_gradient_ready([&](Parameter& p) {
      ready.push_back(p.name());
      values["at ready " + p.name()] = p.grad().to_floats();
    });
    const Var x = tape.input(random_tensor(ctx_, sizes_.stream(), 5), true);
    const Var y = forward(x);
    values["y"] = y.value().to_floats();
    Tensor upstream = ops::cast(ctx_, random_tensor(ctx_, sizes_.stream(), 6), sizes_.compute);
    tape.backward(ctx_, y, std::move(upstream), plan_.weights);
    if (plan_.weights == Weights::deferred) {
      EXPECT_TRUE(ready.empty());
      for (Parameter* p : parameters()) EXPECT_FALSE(p->has_grad()) << p->name();
      tape.run_weight_gradients(ctx_);
    }
    values["x"] = tape.grad(x).to_floats();
    for (Parameter* p : parameters()) {
      EXPECT_TRUE(p->has_grad()) << p->name();
      values[p->name()] = p->grad().to_floats();
    }
    return values;
  }

  std::vector<std::string> ready;  ///< names, in the order they were reported in

 private:
  Stream recomputed(std::size_t first, std::size_t end, const Stream& in, bool nested) const {
    std::vector<Parameter*> parameters;
    for (std::size_t i = first; i < end; ++i) {
      for (Parameter* p : blocks_[i]->parameters()) parameters.push_back(p);
    }
    const auto part = [this, first, end, nested](const std::vector<Var>& in) {
      Stream stream{in[0], in[1]};
      for (std::size_t i = first; i < end; ++i)
        stream = nested ? recomputed(i, i + 1, stream, false) : blocks_[i]->forward(ctx_, stream);
      return std::vector<Var>{stream.residual, stream.branch};
    };
    const auto out = recompute(ctx_, {in.residual, in.branch}, parameters, part, plan_.partition);
    return {out[0], out[1]};
  }

  ExecCtx ctx_;
  BlockSizes sizes_;
  Plan plan_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::unique_ptr<Parameter> norm_;
};

inline void expect_same(const Values& got, const Values& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (const auto& [name, values] : expected) EXPECT_EQ(got.at(name), values) << name;
}

}  // namespace tessera::test
