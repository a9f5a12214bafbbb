#include "engine/loss_plan.hpp"

#include <algorithm>

#include "tessera/ops/elementwise.hpp"
#include "tessera/ops/reduce.hpp"

namespace tessera {
namespace {

double count_of(const ExtraLossSpec& spec, const Batch& batch, int data_ranks) {
  const std::int64_t samples = samples_of_all(batch, data_ranks);
  switch (spec.per) {
    case LossCount::targets:
      return static_cast<double>(batch.global_targets);
    case LossCount::positions:
      return static_cast<double>(batch.global_positions != Batch::kUnknown ? batch.global_positions
                                                                           : samples * batch.seq_length);
    case LossCount::samples:
      return static_cast<double>(samples);
    case LossCount::sample_targets:
      break;
  }
  TESSERA_CHECK(batch.batch == 0 || !batch.sample_labels.empty(), "the loss '", spec.name,
                "' of this model needs sample_labels, and the batch has none");
  TESSERA_CHECK(batch.global_sample_targets != Batch::kUnknown,
                "ranks have not told each other how many sample_labels count");
  return static_cast<double>(batch.global_sample_targets);
}

float value_of(const LossTerm& term) {
  // Over nothing every gradient is zero whatever this is.
  return static_cast<float>(term.weight / std::max(term.count, 1.0));
}

}  // namespace

std::int64_t samples_of_all(const Batch& batch, int data_ranks) {
  return batch.global_batch > 0 ? batch.global_batch : batch.batch * data_ranks;
}

std::vector<LossTerm> terms_of(const Model& model, const Batch& batch, int data_ranks) {
  std::vector<LossTerm> terms;
  if (model.reads_whole_samples()) {
    terms.push_back({.name = "class",
                     .weight = 1.0,
                     .count = count_of({"class", 1.0, LossCount::sample_targets}, batch, data_ranks)});
  } else {
    terms.push_back({.name = "token", .weight = 1.0, .count = static_cast<double>(batch.global_targets)});
  }
  for (const ExtraLossSpec& spec : model.extra_losses()) {
    TESSERA_CHECK(std::ranges::none_of(terms, [&](const LossTerm& each) { return each.name == spec.name; }),
                  "two losses of this model are called '", spec.name, "'; that of its tokens is 'token'");
    terms.push_back({spec.name, spec.weight, count_of(spec, batch, data_ranks), 0});
  }
  return terms;
}

LossPlan LossPlan::mean(std::vector<LossTerm> terms, Tensor scale, bool counts) {
  LossPlan plan(Kind::mean);
  plan.terms_ = std::move(terms);
  plan.sums_.resize(plan.terms_.size());
  plan.scale_ = std::move(scale);
  plan.counts_ = counts;
  return plan;
}

LossPlan LossPlan::outputs(Kind kind, Ask ask) {
  LossPlan plan(kind);
  plan.ask_ = std::move(ask);
  return plan;
}

std::vector<float> LossPlan::gradients() const {
  std::vector<float> values;
  for (const LossTerm& term : terms_) values.push_back(value_of(term));
  return values;
}

void LossPlan::keep_in(const Tensor& gradients, const Tensor& sums) {
  gradients_ = gradients;
  for (std::size_t i = 0; i < sums_.size(); ++i) sums_[i] = sums.narrow(0, static_cast<std::int64_t>(i), 1);
}

Tensor LossPlan::gradient_of(const ExecCtx& ctx, std::size_t term, const Shape& shape) const {
  Tensor gradient = Tensor::empty(ctx, shape, DType::f32);
  ops::fill_constant(ctx, gradient, gradients_ ? 1.0f : value_of(terms_[term]));
  if (gradients_) ops::scale_by(ctx, gradient, gradients_.narrow(0, static_cast<std::int64_t>(term), 1));
  if (scale_) ops::scale_by(ctx, gradient, scale_);
  return gradient;
}

Tensor LossPlan::known_gradient(const ExecCtx& ctx, std::int64_t rows) const {
  return kind_ == Kind::mean ? gradient_of(ctx, 0, {rows}) : Tensor();
}

void LossPlan::add_up(const ExecCtx& ctx, std::size_t term, const Tensor& values) {
  Tensor& sum = sums_[term];
  if (sum) {
    ops::add_sum(ctx, values, sum);
  } else {
    sum = ops::sum(ctx, values);
  }
}

Tensor LossPlan::take(const ExecCtx& ctx, int micro_batch, int count, const Tensor& output) {
  if (kind_ == Kind::mean) {
    add_up(ctx, 0, output);
    return {};
  }
  if (ask_) return ask_(micro_batch, output);
  outputs_.resize(static_cast<std::size_t>(count));
  outputs_[static_cast<std::size_t>(micro_batch)] = output;
  return {};
}

Tensor LossPlan::take_extra(const ExecCtx& ctx, const ExtraLoss& loss) {
  const auto term = std::find_if(terms_.begin() + 1, terms_.end(),
                                 [&](const LossTerm& each) { return each.name == loss.name; });
  TESSERA_CHECK(term != terms_.end(), "the model computes a loss '", loss.name,
                "' that its extra_losses() do not declare");
  const Tensor& values = loss.values.value();
  TESSERA_CHECK(values && values.dtype() == DType::f32 && values.is_contiguous(), "the values of the loss '",
                loss.name, "' are not contiguous fp32");
  const auto index = static_cast<std::size_t>(term - terms_.begin());
  if (counts_ || loss.own_positions) add_up(ctx, index, values);
  return gradient_of(ctx, index, values.shape());
}

void LossPlan::set_upstream(int micro_batch, Tensor gradient) {
  upstream_.resize(outputs_.size());
  upstream_[static_cast<std::size_t>(micro_batch)] = std::move(gradient);
}

Tensor LossPlan::upstream(int micro_batch) const {
  const auto at = static_cast<std::size_t>(micro_batch);
  TESSERA_CHECK(at < upstream_.size() && upstream_[at], "micro-batch ", micro_batch,
                " was given no gradient of its outputs");
  return upstream_[at];
}

std::vector<HostCopy> LossPlan::sums(const ExecCtx& ctx) const {
  std::vector<HostCopy> copies;
  for (const Tensor& sum : sums_) copies.emplace_back(ctx, sum);
  return copies;
}

}  // namespace tessera
