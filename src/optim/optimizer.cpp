#include "tessera/optim/optimizer.hpp"

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>

#include "optim/update_rules.hpp"
#include "tessera/ops/elementwise.hpp"
#include "tessera/ops/optimizer.hpp"
#include "tessera/ops/reduce.hpp"
#include "tessera/optim/tile_walk.hpp"

namespace tessera {
namespace {

void check_config(const OptimizerConfig& config) {
  TESSERA_ENSURE(ConfigError, config.clip_grad >= 0 && std::isfinite(config.clip_grad),
                 "optimizer.clip_grad is ", config.clip_grad, "; give a norm > 0, or 0 for no clipping");
  update_rule(config.name).check(config);
}

}  // namespace

Optimizer::Optimizer(const ExecCtx& ctx, ParamStore& store, const OptimizerConfig& config,
                     const LossScale& loss_scale, ParamGroups groups)
    : ctx_(ctx), store_(store), config_(config), loss_scale_(loss_scale), groups_(std::move(groups)) {
  TESSERA_CHECK(store_.options().trainable,
                "an optimizer needs gradients; this ParamStore was made with trainable = false");
  check_config(config_);
  if (groups_.groups.empty()) groups_ = ParamGroups::by_decay(config_);
  TESSERA_CHECK(groups_.groups.size() <= kMostGroups, groups_.groups.size(),
                " parameter groups; an optimizer takes up to ", kMostGroups,
                ": put parameters that are updated alike into one");
  TESSERA_CHECK(groups_.group_of, "parameter groups need group_of, which says who is in which");
  std::set<std::string> kinds;
  for (std::size_t i = 0; i < groups_.groups.size(); ++i) {
    rules_.push_back(rule_of(groups_.groups[i], config_, i));
    const UpdateRule& rule = update_rule(groups_.groups[i], config_);
    const auto found = std::find_if(applied_.begin(), applied_.end(),
                                    [&](const Applied& other) { return other.rule == &rule; });
    applied_of_.push_back(static_cast<std::size_t>(found - applied_.begin()));
    if (found == applied_.end()) applied_.push_back({&rule});
    for (const char* kind : rule.state) {
      if (rule.keeps_state(rules_.back())) kinds.insert(kind);
    }
  }
  make_state({kinds.begin(), kinds.end()});
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
}

struct Optimizer::Offloaded {
  std::map<std::string, std::shared_ptr<OffloadedBuffer>> state = {};  // by kind
  // Numbers in the walk.
  std::map<std::string, std::size_t> kinds = {};
  std::optional<std::size_t> main = {}, model = {}, gradient = {};
  std::unique_ptr<TileWalk> walk = {};

  std::shared_ptr<OffloadedBuffer> of(const std::string& kind) const {
    const auto found = state.find(kind);
    return found == state.end() ? nullptr : found->second;
  }
};

Optimizer::~Optimizer() = default;

void Optimizer::make_state(const std::vector<std::string>& kinds) {
  const std::shared_ptr<OffloadPlace>& place = store_.place();
  const bool state_goes = place && place->config.optimizer != OffloadTo::none;
  for (const std::string& kind : kinds) {
    if (!state_goes) buffers_[kind] = store_.zeros();
  }
  if (!place) return;
  Offloaded made;
  std::vector<TileWalk::Part> parts;
  const auto add = [&](const std::shared_ptr<OffloadedBuffer>& buffer, bool reads, bool writes) {
    parts.push_back({buffer, reads, writes});
    return parts.size() - 1;
  };
  for (const std::string& kind : kinds) {
    if (!state_goes) continue;
    made.state[kind] = std::make_shared<OffloadedBuffer>(place, place->config.optimizer, kind, DType::f32,
                                                         store_.shards().state_numel());
    made.kinds[kind] = add(made.state[kind], true, true);
  }
  if (const auto& main = store_.weights().main_away()) made.main = add(main, true, true);
  if (const auto& model = store_.weights().model_away()) made.model = add(model, true, true);
  if (place->config.gradients != OffloadTo::none) {
    const GradientMemory& latest = store_.gradient().latest_call();
    made.gradient = add(latest.away(), true, false);
  }
  if (parts.empty()) return;
  made.walk = std::make_unique<TileWalk>(place, std::move(parts));
  offloaded_ = std::make_unique<Offloaded>(std::move(made));
}

bool Optimizer::keeps(const std::string& kind) const {
  return buffers_.contains(kind) || (offloaded_ && offloaded_->of(kind));
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
  TESSERA_CHECK(group.rule == groups_.groups[place].rule, "parameter group ", place,
                " was updated by another rule when the optimizer was made: make a new one");
  const GroupRule rule = rule_of(group, config_, place);
  const UpdateRule& update = *applied_[applied_of_[place]].rule;
  for (const char* kind : update.state) {
    TESSERA_ENSURE(ConfigError, !update.keeps_state(rule) || keeps(kind), "parameter group ", place,
                   " gets a ", kind, ", but no group had one when the optimizer was made: make a new one");
  }
  rules_[place] = rule;
  groups_.groups[place] = group;
}

void Optimizer::find_squares() {
  find_active();
  if (squares_of_ == store_.gradient().version()) return;
  const Tensor squares = ops::squares_of(state_);
  if (has_squares_) ops::fill_zero(ctx_, squares);
  has_squares_ = true;
  squares_of_ = -1;
  const auto [gradient, summed] = store_.gradient().pending();
  const Tensor& runs = summed ? counted_in_sum_ : counted_;
  if (gradient->away()) {
    for (const auto& [tile, inside] : counted_in_tiles_)
      ops::add_sum_squares(ctx_, gradient->read(tile), inside, squares);
  } else if (runs.numel() > 0) {
    ops::add_sum_squares(ctx_, gradient->on_device(), runs, squares);
  }
  if (Communicator* world = store_.options().groups.world; world && world->size() > 1)
    world->all_reduce(ctx_, squares).wait(ctx_);
  squares_of_ = store_.gradient().version();
}

void Optimizer::update(const Applied& applied, const Part& part, const Brought& brought) const {
  auto [gradient, weights, place] = store_.slice(part.bucket, part.run);
  if (brought && store_.weights().main_is_away(part.bucket)) weights.main = brought(*offloaded_->main);
  if (brought && store_.weights().model_is_away(part.bucket)) weights.model = brought(*offloaded_->model);
  if (brought && offloaded_->gradient) gradient = brought(*offloaded_->gradient);
  RuleInput input{
      state_,
      {applied.factors, applied.of_block.narrow(0, place.begin / kGroupBlock, place.count / kGroupBlock)},
      gradient,
      weights,
      {}};
  for (const char* kind : applied.rule->state) {
    if (const auto found = buffers_.find(kind); found != buffers_.end()) {
      input.state.push_back(found->second.narrow(0, place.begin, place.count));
    } else {
      input.state.push_back(keeps(kind) ? brought(offloaded_->kinds.at(kind)) : Tensor());
    }
  }
  applied.rule->update(ctx_, config_, input);
}

void Optimizer::update_all() {
  // The last bucket holds what the next forward pass reads first: it is under way while the others are
  // updated.
  for (std::size_t i = changes_.size(); i-- > 0;) {
    for (const Applied& applied : applied_) {
      for (const Part& part : applied.parts) {
        if (part.bucket == i) update(applied, part, nullptr);
      }
    }
    if (changes_[i]) store_.weights().spread(i);
  }
}

void Optimizer::update_offloaded() {
  struct Piece {
    const Applied* applied;
    Part part;
    std::int64_t begin;  ///< in its tile
  };
  const std::int64_t size = offloaded_->walk->tile();
  std::map<std::int64_t, std::vector<Piece>, std::greater<>> pieces;  // by tile, in the order of update_all
  for (const Applied& applied : applied_) {
    for (const Part& part : applied.parts) {
      const std::int64_t first = store_.shards().in_state(part.bucket, part.run).begin;
      for (std::int64_t done = 0; done < part.run.count;) {
        const std::int64_t tile = (first + done) / size, begin = (first + done) % size;
        const std::int64_t count = std::min(part.run.count - done, size - begin);
        pieces[tile].push_back({&applied, {part.bucket, {part.run.begin + done, count}}, begin});
        done += count;
      }
    }
  }
  std::size_t left = changes_.size();
  const auto spread_from = [&](std::int64_t place) {
    for (; left > 0; --left) {
      if (store_.shards().in_state(left - 1, store_.shards().updated(left - 1)).begin < place) return;
      if (changes_[left - 1]) store_.weights().spread(left - 1);
    }
  };
  if (offloaded_->gradient)
    offloaded_->walk->exchange(*offloaded_->gradient, store_.gradient().pending().flat->away());
  std::vector<std::int64_t> tiles;
  for (const auto& [tile, list] : pieces) tiles.push_back(tile);
  offloaded_->walk->walk(tiles, [&](std::int64_t tile, const std::vector<Tensor>& values) {
    for (const Piece& piece : pieces.at(tile)) {
      update(*piece.applied, piece.part,
             [&](std::size_t part) { return values[part].narrow(0, piece.begin, piece.part.run.count); });
    }
    spread_from(tile * size);
  });
  spread_from(0);
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
  const double scale = store_.gradient().scale();
  store_.weights().wait();
  find_squares();
  ops::begin_update(ctx_, state_,
                    {.grad_scale = scale, .clip_grad = config_.clip_grad, .loss_scale = loss_scale_.rule});
  has_squares_ = false;  // begin_update has used them up
  squares_of_ = -1;
  for (const Applied& applied : applied_) {
    std::vector<GroupRule> rules;
    for (const Cohort& cohort : applied.cohorts) {
      rules.push_back(rules_[cohort.group]);
      rules.back().missed = cohort.missed;
    }
    ops::update_groups(ctx_, state_, applied.factors,
                       {.decoupled = applied.rule->decoupled,
                        .base = updates_,
                        .num_rates = static_cast<int>(candidates),
                        .rules = rules});
  }
  under_way_.emplace_back(ctx_, state_);
  if (offloaded_) {
    update_offloaded();
  } else {
    update_all();
  }
  store_.gradient().discard();
}

double Optimizer::grad_norm() {
  const double scale = store_.gradient().scale();
  store_.weights().wait();
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
  TESSERA_CHECK(!store_.shards().sharded(),
                "this rank holds a share of the optimizer state: pieces gives it");
  TESSERA_CHECK(!offloaded_ || offloaded_->state.empty(),
                "the optimizer state is not on the device: pieces gives it");
  std::vector<NamedTensor> list;
  for (const auto& [kind, buffer] : buffers_) {
    for (const Parameter* p : store_.parameters()) {
      list.push_back({kind + "." + p->name(), store_.view(buffer, *p), p});
    }
  }
  return list;
}

std::vector<StatePiece> Optimizer::pieces(PieceSet set) const {
  std::set<std::string> kinds;
  for (const auto& [kind, buffer] : buffers_) kinds.insert(kind);
  if (offloaded_) {
    for (const auto& [kind, buffer] : offloaded_->state) kinds.insert(kind);
  }
  std::vector<StatePiece> list;
  for (const std::string& kind : kinds) {
    for (StatePiece& piece : pieces(set, kind)) list.push_back(std::move(piece));
  }
  return list;
}

std::vector<StatePiece> Optimizer::pieces(PieceSet set, const std::string& kind) const {
  TESSERA_CHECK(keeps(kind), "this optimizer keeps no ", kind);
  const auto away = offloaded_ ? offloaded_->of(kind) : nullptr;
  if (!away) return store_.pieces(set, kind, StateValues{buffers_.at(kind)});
  return store_.pieces(set, kind, away->values(away, {0, store_.shards().state_numel()}));
}

std::size_t Optimizer::persistent_bytes() const {
  std::size_t bytes = 0;
  for (const auto& [kind, buffer] : buffers_) bytes += buffer.nbytes();
  if (!offloaded_) return bytes;
  for (const auto& [kind, buffer] : offloaded_->state) bytes += buffer->resident_bytes();
  return bytes + offloaded_->walk->resident_bytes();
}

}  // namespace tessera
