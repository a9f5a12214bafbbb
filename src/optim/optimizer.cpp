#include "tessera/optim/optimizer.hpp"

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
                     const LossScale& loss_scale, ParamGroups groups)
    : ctx_(ctx), store_(store), config_(config), loss_scale_(loss_scale), groups_(std::move(groups)) {
  TESSERA_CHECK(store_.trainable(),
                "an optimizer needs gradients; this ParamStore was made with trainable = false");
  check_config(config_);
  if (groups_.groups.empty()) groups_ = ParamGroups::by_decay(config_);
  TESSERA_CHECK(groups_.groups.size() <= kMostGroups, groups_.groups.size(),
                " parameter groups; an optimizer takes up to ", kMostGroups,
                ": put parameters that are updated alike into one");
  TESSERA_CHECK(groups_.group_of, "parameter groups need group_of, which says who is in which");
  for (std::size_t i = 0; i < groups_.groups.size(); ++i)
    rules_.push_back(rule_of(groups_.groups[i], config_, i));
  std::vector<bool> active;
  for (const ParamSlot& slot : store_.slots()) {
    excluded_.push_back(groups_.freezes(*slot.parameter));
    active.push_back(!frozen(*slot.parameter));
  }
  had_.assign(active.size(), 0);
  missed_ = had_;
  select(active);
  UpdateState first;
  first.loss_scale = loss_scale.first;
  first.hysteresis = loss_scale.rule.hysteresis;
  state_ = ops::make_update_state(ctx_, first);
  if (config_.name != OptimizerName::sgd) {
    m_ = store_.zeros();
    v_ = store_.zeros();
  } else if (std::any_of(rules_.begin(), rules_.end(), [](const auto& rule) { return rule.momentum > 0; })) {
    momentum_ = store_.zeros();
  }
}

std::size_t Optimizer::group_of(const Parameter& parameter) const {
  store_.layout().index_of(parameter);  // refuses a stranger
  return groups_.group_of(parameter);
}

bool Optimizer::decays(const Parameter& parameter) const {
  return groups_.groups[group_of(parameter)].decay_factor != 0 && !frozen(parameter);
}

void Optimizer::set_group(std::size_t place, const ParamGroup& group) {
  TESSERA_CHECK(place < rules_.size(), "there is no parameter group ", place, ": there are ", rules_.size(),
                ", from 0");
  TESSERA_CHECK(group.frozen == groups_.groups[place].frozen, "parameter group ", place, " is ",
                group.frozen ? "trained" : "frozen", " since the optimizer was made: make a new one");
  const GroupRule rule = rule_of(group, config_, place);
  TESSERA_ENSURE(ConfigError, rule.momentum == 0 || momentum_, "parameter group ", place,
                 " gets a momentum, but no group had one when the optimizer was made: make a new one");
  rules_[place] = rule;
  groups_.groups[place] = group;
}

void Optimizer::find_squares() {
  find_active();
  if (squares_of_ == store_.gradient_version()) return;
  const Tensor squares = ops::squares_of(state_);
  if (has_squares_) ops::fill_zero(ctx_, squares);
  has_squares_ = true;
  squares_of_ = -1;
  const auto [gradient, summed] = store_.pending_gradient();
  const Tensor& runs = summed ? counted_in_sum_ : counted_;
  if (runs.numel() > 0) ops::add_sum_squares(ctx_, gradient, runs, squares);
  if (Communicator* world = store_.groups().world; world && world->size() > 1)
    world->all_reduce(ctx_, squares).wait(ctx_);
  squares_of_ = store_.gradient_version();
}

void Optimizer::update(const Part& part) const {
  const auto [grad, weights, place] = store_.slice(part.bucket, part.run);
  const auto narrow = [run = place](const Tensor& state) {
    return state ? state.narrow(0, run.begin, run.count) : Tensor();
  };
  const ops::ElementGroups groups{factors_,
                                  of_block_.narrow(0, place.begin / kGroupBlock, place.count / kGroupBlock)};
  if (config_.name == OptimizerName::sgd) {
    ops::sgd(ctx_, state_, groups, grad, weights, narrow(momentum_), config_.nesterov);
  } else {
    ops::adam(ctx_, state_, groups, grad, weights, narrow(m_), narrow(v_));
  }
}

void Optimizer::launch_step(const std::function<UpdateRates(std::int64_t)>& rates) {
  launch_step([&](std::int64_t updates) {
    const UpdateRates all = rates(updates);
    std::vector<UpdateRates> each;
    for (const ParamGroup& group : groups_.groups)
      each.push_back({all.lr * group.lr_factor, all.weight_decay * group.decay_factor});
    return each;
  });
}

void Optimizer::launch_step(const std::function<std::vector<UpdateRates>(std::int64_t)>& rates) {
  static_assert(kMostUnderWay <= GroupRule::kRates, "each number of skipped updates has its rates");
  TESSERA_CHECK(under_way_.size() < kMostUnderWay, under_way_.size(),
                " updates are under way: finish_step() takes the result of the oldest");
  const std::size_t candidates = under_way_.size() + 1;
  for (std::size_t i = 0; i < candidates; ++i) {
    const std::vector<UpdateRates> each = rates(updates_ + static_cast<std::int64_t>(i));
    TESSERA_CHECK_EQ(each.size(), rules_.size(), "rates of a step, one for each parameter group");
    for (std::size_t group = 0; group < each.size(); ++group) {
      TESSERA_CHECK(std::isfinite(each[group].lr) && std::isfinite(each[group].weight_decay),
                    "step with learning rate ", each[group].lr, " and weight decay ",
                    each[group].weight_decay, " of parameter group ", group);
      rules_[group].rates[i] = each[group];
    }
  }
  const double scale = store_.gradient_scale();
  store_.wait_for_weights();
  find_squares();
  ops::begin_update(ctx_, state_,
                    {.grad_scale = scale, .clip_grad = config_.clip_grad, .loss_scale = loss_scale_.rule});
  has_squares_ = false;  // begin_update has used them up
  squares_of_ = -1;
  std::vector<GroupRule> rules;
  for (const Cohort& cohort : cohorts_) {
    rules.push_back(rules_[cohort.group]);
    rules.back().missed = cohort.missed;
  }
  ops::update_groups(ctx_, state_, factors_,
                     {.decoupled = config_.name == OptimizerName::adamw,
                      .base = updates_,
                      .num_rates = static_cast<int>(candidates),
                      .rules = rules});
  under_way_.emplace_back(ctx_, state_);
  // The last bucket holds what the next forward pass reads first: it is under way while the others are
  // updated.
  std::size_t part = parts_.size();
  for (std::size_t i = changes_.size(); i-- > 0;) {
    if (part > 0 && parts_[part - 1].bucket == i) update(parts_[--part]);
    if (changes_[i]) store_.spread_weights(i);
  }
  store_.discard_gradients();
}

double Optimizer::grad_norm() {
  const double scale = store_.gradient_scale();
  store_.wait_for_weights();
  find_squares();
  const auto state = HostCopy(ctx_, state_).value<UpdateState>();
  return std::sqrt(state.squares) * std::abs(scale) / static_cast<double>(state.loss_scale);
}

void Optimizer::set_clip_grad(double max_norm) {
  OptimizerConfig changed = config_;
  changed.clip_grad = max_norm;
  check_config(changed);
  config_ = changed;
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
  auto state = HostCopy(ctx_, state_).value<UpdateState>();
  state.squares = 0;
  return state;
}

void Optimizer::set_update_state(const UpdateState& state) {
  TESSERA_CHECK(state.updates >= 0, "the number of updates cannot be ", state.updates);
  TESSERA_CHECK(under_way_.empty(), "an update is under way: finish_step() comes first");
  updates_ = state.updates;
  state_.copy_from_host(&state);
  has_squares_ = true;  // whatever they are, they are of no gradient here
  had_.assign(active_.size(), 0);
  missed_ = had_;
  select(active_);
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

std::vector<StatePiece> Optimizer::pieces(PieceSet set, const std::string& kind) const {
  for (const auto& [name, buffer] : buffers()) {
    if (name == kind) return store_.pieces(set, kind, buffer);
  }
  throw InvalidArgument(detail::concat("this optimizer keeps no ", kind));
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
