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

Optimizer::Optimizer(const ExecCtx& ctx, ParamStore& store, const OptimizerConfig& config,
                     const LossScale& loss_scale)
    : ctx_(ctx), store_(store), config_(config), loss_scale_(loss_scale) {
  TESSERA_CHECK(store_.trainable(),
                "an optimizer needs gradients; this ParamStore was made with trainable = false");
  check_config(config_);
  find_work();
  UpdateState first;
  first.loss_scale = loss_scale.first;
  first.hysteresis = loss_scale.rule.hysteresis;
  state_ = ops::make_update_state(ctx_, first);
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
  store_.layout().index_of(parameter);  // refuses a stranger
  return decay_rule(parameter);
}

void Optimizer::find_work() {
  const FlatLayout& layout = store_.layout();
  for (std::size_t i = 0; i < layout.buckets().size(); ++i) {
    const Bucket& bucket = layout.buckets()[i];
    const auto slots = layout.slots_of(bucket);
    BucketWork work;
    std::vector<FlatRun> counted;
    for (std::size_t j = 0; j < slots.size(); ++j) {
      // With the gap after it: what is updated alike becomes one run.
      const std::int64_t end = j + 1 < slots.size() ? slots[j + 1].offset : bucket.run().end();
      const FlatRun with_gap = {slots[j].offset, end - slots[j].offset};
      const bool decay = decay_rule(*slots[j].parameter);
      if (const FlatRun run = overlap(with_gap, store_.updated(i)); run.count > 0) {
        if (work.updates.empty() || work.updates.back().decay != decay) {
          work.updates.push_back({run, decay});
        } else {
          work.updates.back().run.count += run.count;
        }
      }
      for (FlatRun run : store_.counted(*slots[j].parameter)) {
        if (run.end() == slots[j].numel) run.count = with_gap.count - run.begin;
        append(counted, {slots[j].offset + run.begin, run.count});
      }
    }
    for (const FlatRun& run : counted) append(work.counted, overlap(run, store_.share(i)));
    work_.push_back(std::move(work));
  }
}

void Optimizer::add_up_squares() const {
  const Tensor squares = ops::squares_of(state_);
  for (std::size_t i = 0; i < work_.size(); ++i) {
    for (const FlatRun& run : work_[i].counted) {
      ops::add_sum_squares(ctx_, store_.slice(i, run).gradient, squares);
    }
  }
  if (Communicator* world = store_.groups().world; world && world->size() > 1)
    world->all_reduce(ctx_, squares).wait(ctx_);
}

void Optimizer::update(std::size_t bucket, const Range& range) const {
  const auto [grad, main, model, place] = store_.slice(bucket, range.run);
  const auto part = [run = place](const Tensor& state) {
    return state ? state.narrow(0, run.begin, run.count) : Tensor();
  };
  const double decay = range.decay ? 1.0 : 0.0;
  if (config_.name == OptimizerName::sgd) {
    ops::sgd(ctx_, state_, grad, main, part(momentum_), model,
             {.decay_factor = decay, .momentum = config_.momentum, .nesterov = config_.nesterov});
  } else {
    ops::adam(ctx_, state_, grad, main, part(m_), part(v_), model,
              {.beta1 = config_.betas[0],
               .beta2 = config_.betas[1],
               .eps = config_.eps,
               .decay_factor = decay,
               .decoupled = config_.name == OptimizerName::adamw});
  }
}

void Optimizer::launch_step(const std::function<UpdateRates(std::int64_t)>& rates) {
  TESSERA_CHECK(under_way_.size() < kMostUnderWay, under_way_.size(),
                " updates are under way: finish_step() takes the result of the oldest");
  std::vector<UpdateRates> list;
  for (std::size_t i = 0; i <= under_way_.size(); ++i) {
    list.push_back(rates(updates_ + static_cast<std::int64_t>(i)));
    TESSERA_CHECK(std::isfinite(list.back().lr) && std::isfinite(list.back().weight_decay),
                  "step with learning rate ", list.back().lr, " and weight decay ", list.back().weight_decay);
  }
  const double scale = store_.gradient_scale();
  store_.wait_for_weights();
  add_up_squares();
  const bool adam = config_.name != OptimizerName::sgd;
  ops::begin_update(ctx_, state_,
                    {.grad_scale = scale,
                     .clip_grad = config_.clip_grad,
                     .beta1 = adam ? config_.betas[0] : 0.0,
                     .beta2 = adam ? config_.betas[1] : 0.0,
                     .loss_scale = loss_scale_.rule,
                     .base = updates_,
                     .rates = list});
  under_way_.emplace_back(ctx_, state_);
  // The last bucket holds what the next forward pass reads first: it is under way while the others are
  // updated.
  for (std::size_t i = work_.size(); i-- > 0;) {
    for (const Range& range : work_[i].updates) update(i, range);
    store_.spread_weights(i);
  }
  store_.discard_gradients();
}

StepResult Optimizer::finish_step() {
  TESSERA_CHECK(!under_way_.empty(), "no update is under way");
  const UpdateState state = under_way_.front().value<UpdateState>();
  under_way_.pop_front();
  updates_ = state.updates;
  StepResult result{.grad_norm = state.grad_norm,
                    .clip_factor = state.clip_factor,
                    .skipped = state.skip != 0,
                    .loss_scale = state.loss_scale};
  if (result.skipped) result.clip_factor = 1.0;
  return result;
}

StepResult Optimizer::step(double lr, double weight_decay) {
  launch_step([&](std::int64_t) { return UpdateRates{lr, weight_decay}; });
  return finish_step();
}

Tensor Optimizer::loss_scale() const {
  const bool scales = loss_scale_.first != 1.0f || loss_scale_.rule.growth_interval > 0;
  return scales ? ops::loss_scale_of(state_) : Tensor();
}

UpdateState Optimizer::update_state() const {
  TESSERA_CHECK(under_way_.empty(), "an update is under way: finish_step() comes first");
  return HostCopy(ctx_, state_).value<UpdateState>();
}

void Optimizer::set_update_state(const UpdateState& state) {
  TESSERA_CHECK(state.updates >= 0, "the number of updates cannot be ", state.updates);
  TESSERA_CHECK(under_way_.empty(), "an update is under way: finish_step() comes first");
  updates_ = state.updates;
  state_.copy_from_host(&state);
}

std::vector<NamedTensor> Optimizer::state() const {
  TESSERA_CHECK(!store_.sharded(), "this rank holds a share of the optimizer state: pieces gives it");
  std::vector<NamedTensor> list;
  for (const auto& [kind, buffer] : buffers()) {
    for (const Parameter* p : store_.parameters()) {
      list.push_back({kind + "." + p->name(), store_.view(buffer, *p), p});
    }
  }
  return list;
}

std::vector<StatePiece> Optimizer::pieces(PieceSet set) const {
  std::vector<StatePiece> list;
  for (const auto& [kind, buffer] : buffers()) {
    for (StatePiece& piece : store_.pieces(set, kind, buffer)) list.push_back(std::move(piece));
  }
  return list;
}

std::size_t Optimizer::persistent_bytes() const {
  std::size_t bytes = 0;
  for (const auto& [kind, buffer] : buffers()) bytes += buffer.nbytes();
  return bytes;
}

std::vector<std::pair<std::string, Tensor>> Optimizer::buffers() const {
  std::vector<std::pair<std::string, Tensor>> list;
  if (m_) list = {{"adam_m", m_}, {"adam_v", v_}};
  if (momentum_) list = {{"momentum", momentum_}};
  return list;
}

}  // namespace tessera
