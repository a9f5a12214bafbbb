#pragma once
#include <functional>
#include <string>
#include <vector>

#include "tessera/data/batch.hpp"
#include "tessera/engine/loss_term.hpp"
#include "tessera/nn/model.hpp"
#include "tessera/tensor/host_copy.hpp"

namespace tessera {

/// The loss of one call: what the last piece of the model is asked for, what becomes of that, and which
/// gradient goes back from it and from extra losses.
class LossPlan {
 public:
  /// mean: the model's own loss over the batch, extra losses included; its gradients are known before the
  /// first pass. per_token: the losses of each token, and caller: logits, for a loss that is not the model's;
  /// samples: likewise, those of samples beside those of tokens.
  enum class Kind { mean, per_token, caller, samples };
  /// Gets what the last piece returned for a micro-batch; returns its gradient.
  using Ask = std::function<Tensor(int micro_batch, const Tensor& output)>;

  /// `terms`: as terms_of makes them. `scale` (f32 [1] on the device, or undefined = 1) multiplies all
  /// gradients. `counts`: whether this rank adds up extra losses that its tensor ranks have alike.
  static LossPlan mean(std::vector<LossTerm> terms, Tensor scale, bool counts);
  /// Outputs are kept, and set_upstream() brings their gradients; with `ask` it is asked instead, and none is
  /// kept.
  static LossPlan outputs(Kind kind, Ask ask = nullptr);

  Kind kind() const { return kind_; }
  Model::Output output() const {
    return kind_ == Kind::caller    ? Model::Output::logits
           : kind_ == Kind::samples ? Model::Output::sample_logits
                                    : Model::Output::losses;
  }
  /// The gradient of each of `rows` losses of tokens; undefined where it is not known before the pass.
  Tensor known_gradient(const ExecCtx& ctx, std::int64_t rows) const;
  /// Takes what the last piece returned for micro-batch `micro_batch` of `count`. Returns its gradient, or an
  /// undefined tensor where set_upstream() brings it; then that is upstream().
  Tensor take(const ExecCtx& ctx, int micro_batch, int count, const Tensor& output);
  /// Takes an extra loss; returns the gradient of its values. Errors: InvalidArgument for one that the model
  /// does not declare, or whose values are not fp32.
  Tensor take_extra(const ExecCtx& ctx, const ExtraLoss& loss);

  /// The gradient of outputs()[micro_batch], in its shape.
  void set_upstream(int micro_batch, Tensor gradient);
  /// Errors: InvalidArgument where it was not set.
  Tensor upstream(int micro_batch) const;
  /// What the last piece returned for each micro-batch, where it is kept; empty on ranks without the head.
  const std::vector<Tensor>& outputs() const { return outputs_; }
  const std::vector<LossTerm>& terms() const { return terms_; }
  /// What each term's values get as gradient before the loss scale, by term. Kind::mean.
  std::vector<float> gradients() const;
  /// Takes them from `gradients` (f32 [terms] on the device), and adds up in `sums` (f64 [terms], which begin
  /// as zeros), so that a graph serves the next call.
  void keep_in(const Tensor& gradients, const Tensor& sums);
  /// What this rank added up of each term so far, f64; nothing where it has no part in it.
  std::vector<HostCopy> sums(const ExecCtx& ctx) const;

 private:
  explicit LossPlan(Kind kind) : kind_(kind) {}
  void add_up(const ExecCtx& ctx, std::size_t term, const Tensor& values);
  Tensor gradient_of(const ExecCtx& ctx, std::size_t term, const Shape& shape) const;

  Kind kind_;
  std::vector<LossTerm> terms_;
  std::vector<Tensor> sums_;  // by term, f64 [1], or undefined
  Tensor scale_, gradients_;
  bool counts_ = true;
  Ask ask_;
  std::vector<Tensor> outputs_, upstream_;
};

/// The terms of the model's own loss over a batch that ranks have agreed on, nothing added up yet: the
/// tokens' first. Errors: InvalidArgument for a batch without what an extra loss is counted by.
std::vector<LossTerm> terms_of(const Model& model, const Batch& batch, int data_ranks);

/// Samples of all data ranks together.
std::int64_t samples_of_all(const Batch& batch, int data_ranks);

}  // namespace tessera
