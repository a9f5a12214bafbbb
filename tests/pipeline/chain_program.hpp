#pragma once
/// A chain of small affine pieces in whole numbers, exact in fp32, whose serial run is known.

#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tessera/pipeline/executor.hpp"

namespace tessera::test {

/// Piece k computes y = a x + b + i for micro-batch i, with a and b of its own; the loss is the sum of
/// weight(i, j) y_j. Micro-batches differ in size.
struct Chain {
  int pieces = 1, micro_batches = 1;

  static float a(int piece) { return std::vector<float>{2, -1, 1, -2}[static_cast<std::size_t>(piece % 4)]; }
  static float b(int piece) { return static_cast<float>(piece % 3 - 1); }
  static Shape shape(int micro_batch) { return {(micro_batch * 3 + 2) % 5, 2}; }
  static float input(int micro_batch, std::int64_t j) {
    return static_cast<float>((5 * micro_batch + 3 * j) % 7 - 3);
  }
  static float weight(int micro_batch, std::int64_t j) {
    return static_cast<float>((micro_batch + j) % 3 - 1);
  }
};

/// Per piece: gradients of a and b, summed over micro-batches; and the loss.
struct ChainResult {
  std::map<int, std::pair<double, double>> gradients;
  double loss = 0;
  friend bool operator==(const ChainResult&, const ChainResult&) = default;
};

inline ChainResult run_serially(const Chain& chain, bool forward_only) {
  ChainResult result;
  for (int i = 0; i < chain.micro_batches; ++i)
    for (std::int64_t j = 0; j < Chain::shape(i).numel(); ++j) {
      std::vector<double> x = {Chain::input(i, j)};
      for (int k = 0; k < chain.pieces; ++k) x.push_back(Chain::a(k) * x.back() + Chain::b(k) + i);
      result.loss += Chain::weight(i, j) * x.back();
      double grad = Chain::weight(i, j);
      for (int k = chain.pieces - 1; k >= 0 && !forward_only; --k) {
        result.gradients[k].first += grad * x[static_cast<std::size_t>(k)];
        result.gradients[k].second += grad;
        grad *= Chain::a(k);
      }
    }
  return result;
}

/// The pieces of one stage. Throws where the executor breaks the contract of StageProgram.
class ChainProgram : public StageProgram {
 public:
  ChainProgram(const ExecCtx& ctx, const Schedule& schedule, int stage)
      : ctx_(ctx), schedule_(schedule), chain_{schedule.pieces(), schedule.micro_batches}, stage_(stage) {}

  std::vector<Tensor> forward(int chunk, int micro_batch, std::vector<Tensor> inputs) override {
    on_pass({Action::Kind::forward, chunk, micro_batch});
    const int piece = schedule_.piece_of(stage_, chunk);
    expect(inputs.size() == (piece > 0 ? 1u : 0u), "input of forward");
    Tensor x = piece > 0 ? std::move(inputs[0]) : make(micro_batch, &Chain::input);
    Tensor y = map(x, Chain::a(piece), Chain::b(piece) + static_cast<float>(micro_batch));
    if (!schedule_.forward_only) kept_[{chunk, micro_batch}] = x;
    most_kept_ = std::max(most_kept_, static_cast<int>(kept_.size()) + (schedule_.forward_only ? 1 : 0));
    if (piece + 1 < chain_.pieces) return {y};
    for (std::int64_t j = 0; j < y.numel(); ++j)
      result_.loss += Chain::weight(micro_batch, j) * y.data<float>()[j];
    return {};
  }

  std::vector<Tensor> backward(int chunk, int micro_batch, std::vector<Tensor> grads, bool weights) override {
    on_pass({weights ? Action::Kind::backward : Action::Kind::input_gradient, chunk, micro_batch});
    const int piece = schedule_.piece_of(stage_, chunk);
    expect(grads.size() == (piece + 1 < chain_.pieces ? 1u : 0u), "gradient of backward");
    expect(kept_.contains({chunk, micro_batch}), "backward after forward");
    const Tensor grad = grads.empty() ? make(micro_batch, &Chain::weight) : grads[0];
    grads_[{chunk, micro_batch}] = grad;
    std::vector<Tensor> input_grads;
    if (piece > 0) input_grads.push_back(map(grad, Chain::a(piece), 0));
    if (weights) add_weights(chunk, micro_batch);
    return input_grads;
  }

  void weight_gradient(int chunk, int micro_batch) override {
    on_pass({Action::Kind::weight_gradient, chunk, micro_batch});
    expect(grads_.contains({chunk, micro_batch}), "weight gradient after backward");
    add_weights(chunk, micro_batch);
  }

  std::vector<Port> inputs(int, int micro_batch) const override {
    return {{Chain::shape(micro_batch), DType::f32, "x"}};
  }
  std::vector<Port> outputs(int chunk, int micro_batch) const override { return inputs(chunk, micro_batch); }

  const ChainResult& result() const { return result_; }
  int most_kept() const { return most_kept_; }
  std::size_t left() const { return kept_.size() + grads_.size(); }

 protected:
  /// At the start of each pass.
  virtual void on_pass(const Action&) {}

 private:
  static void expect(bool holds, const std::string& what) {
    if (!holds) throw std::logic_error("contract broken: " + what);
  }
  Tensor make(int micro_batch, float (*value)(int, std::int64_t)) const {
    Tensor t = Tensor::empty(ctx_, Chain::shape(micro_batch), DType::f32);
    for (std::int64_t j = 0; j < t.numel(); ++j) t.data<float>()[j] = value(micro_batch, j);
    return t;
  }
  Tensor map(const Tensor& x, float factor, float offset) const {
    Tensor y = Tensor::empty(ctx_, x.shape(), DType::f32);
    for (std::int64_t j = 0; j < x.numel(); ++j) y.data<float>()[j] = factor * x.data<float>()[j] + offset;
    return y;
  }
  void add_weights(int chunk, int micro_batch) {
    const Tensor x = kept_.at({chunk, micro_batch}), grad = grads_.at({chunk, micro_batch});
    auto& [a, b] = result_.gradients[schedule_.piece_of(stage_, chunk)];
    for (std::int64_t j = 0; j < x.numel(); ++j) {
      a += static_cast<double>(grad.data<float>()[j]) * x.data<float>()[j];
      b += grad.data<float>()[j];
    }
    kept_.erase({chunk, micro_batch});
    grads_.erase({chunk, micro_batch});
  }

  ExecCtx ctx_;
  const Schedule& schedule_;
  Chain chain_;
  int stage_;
  std::map<std::pair<int, int>, Tensor> kept_, grads_;  // by chunk and micro-batch
  ChainResult result_;
  int most_kept_ = 0;
};

}  // namespace tessera::test
