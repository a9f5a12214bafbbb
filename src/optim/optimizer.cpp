#include "tessera/optim/optimizer.hpp"

#include <fnmatch.h>

#include <algorithm>
#include <cmath>

#include "tessera/ops/elementwise.hpp"
#include "tessera/ops/optimizer.hpp"
#include "tessera/ops/reduce.hpp"

namespace tessera {
namespace {

void check_config(const OptimizerConfig& config) {
  TESSERA_ENSURE(ConfigError, config.clip_grad >= 0 && std::isfinite(config.clip_grad),
                 "optimizer.clip_grad is ", config.clip_grad, "; give a norm > 0, or 0 for no clipping");
  if (config.name == OptimizerName::sgd) {
    TESSERA_ENSURE(ConfigError, config.momentum >= 0 && config.momentum < 1, "optimizer.momentum is ",
                   config.momentum, "; it must lie in [0, 1)");
    TESSERA_ENSURE(ConfigError, !config.nesterov || config.momentum > 0,
                   "optimizer.nesterov needs momentum > 0");
    return;
  }
  TESSERA_ENSURE(ConfigError, config.betas.size() == 2, "optimizer.betas has ", config.betas.size(),
                 " values; Adam needs two");
  for (const double beta : config.betas) {
    TESSERA_ENSURE(ConfigError, beta >= 0 && beta < 1, "optimizer.betas contains ", beta,
                   "; each must lie in [0, 1)");
  }
  TESSERA_ENSURE(ConfigError, config.eps > 0, "optimizer.eps is ", config.eps, "; it must be > 0");
}

}  // namespace

Optimizer::Optimizer(const ExecCtx& ctx, ParamStore& store, const OptimizerConfig& config)
    : ctx_(ctx), store_(store), config_(config) {
  TESSERA_CHECK(store_.trainable(),
                "an optimizer needs gradients; this ParamStore was made with trainable = false");
  check_config(config_);
  find_ranges();
  if (config_.name != OptimizerName::sgd) {
    m_ = store_.zeros();
    v_ = store_.zeros();
  } else if (config_.momentum > 0) {
    momentum_ = store_.zeros();
  }
}

bool Optimizer::decay_rule(const Parameter& parameter) const {
  if (parameter.shape().rank() <= 1) return false;
  return std::none_of(config_.no_decay.begin(), config_.no_decay.end(), [&](const std::string& glob) {
    return fnmatch(glob.c_str(), parameter.name().c_str(), 0) == 0;
  });
}

bool Optimizer::decays(const Parameter& parameter) const {
  store_.main(parameter);  // refuses a stranger
  return decay_rule(parameter);
}

void Optimizer::find_ranges() {
  for (const ParamSlot& slot : store_.slots()) {
    const bool decay = decay_rule(*slot.parameter);
    if (ranges_.empty() || ranges_.back().decay != decay) {
      if (!ranges_.empty()) ranges_.back().count = slot.offset - ranges_.back().begin;
      ranges_.push_back({slot.offset, 0, decay});
    }
  }
  if (!ranges_.empty()) ranges_.back().count = store_.numel() - ranges_.back().begin;
}

double Optimizer::global_norm(const FlatGradient& gradient) const {
  const Tensor squares = Tensor::empty(ctx_, {1}, DType::f64);
  ops::fill_zero(ctx_, squares);
  ops::add_sum_squares(ctx_, gradient.flat, squares);
  ctx_.stream->synchronize();
  return std::abs(gradient.scale) * std::sqrt(*squares.data<double>());
}

void Optimizer::update(const Range& range, const FlatGradient& gradient, double grad_scale, double lr,
                       double weight_decay) const {
  const auto part = [&](const Tensor& buffer) {
    return buffer ? buffer.narrow(0, range.begin, range.count) : Tensor();
  };
  const Tensor grad = part(gradient.flat);
  const Tensor main = part(store_.main_buffer());
  const Tensor model = part(store_.model_buffer());
  const double decay = range.decay ? weight_decay : 0.0;
  if (config_.name == OptimizerName::sgd) {
    ops::sgd(ctx_, grad, main, part(momentum_), model,
             {.lr = lr,
              .momentum = config_.momentum,
              .weight_decay = decay,
              .nesterov = config_.nesterov,
              .grad_scale = grad_scale});
  } else {
    ops::adam(ctx_, grad, main, part(m_), part(v_), model,
              {.lr = lr,
               .beta1 = config_.betas[0],
               .beta2 = config_.betas[1],
               .eps = config_.eps,
               .weight_decay = decay,
               .decoupled = config_.name == OptimizerName::adamw,
               .step = updates_,
               .grad_scale = grad_scale});
  }
}

StepResult Optimizer::step(double lr, double weight_decay) {
  TESSERA_CHECK(std::isfinite(lr) && std::isfinite(weight_decay), "step with learning rate ", lr,
                " and weight decay ", weight_decay);
  const FlatGradient gradient = store_.gradients();
  StepResult result;
  result.grad_norm = global_norm(gradient);
  result.skipped = !std::isfinite(result.grad_norm);
  if (!result.skipped) {
    if (config_.clip_grad > 0)
      result.clip_factor = std::min(1.0, config_.clip_grad / (result.grad_norm + 1e-6));
    ++updates_;
    for (const Range& range : ranges_) {
      update(range, gradient, gradient.scale * result.clip_factor, lr, weight_decay);
    }
  }
  store_.discard_gradients();
  return result;
}

void Optimizer::set_updates(std::int64_t updates) {
  TESSERA_CHECK(updates >= 0, "the number of updates cannot be ", updates);
  updates_ = updates;
}

std::vector<NamedTensor> Optimizer::state() const {
  std::vector<NamedTensor> pieces;
  const auto add = [&](const std::string& kind, const Tensor& buffer) {
    if (!buffer) return;
    for (const Parameter* p : store_.parameters()) {
      pieces.push_back({kind + "." + p->name(), store_.view(buffer, *p), p});
    }
  };
  add("adam_m", m_);
  add("adam_v", v_);
  add("momentum", momentum_);
  return pieces;
}

}  // namespace tessera
