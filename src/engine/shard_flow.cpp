#include "engine/shard_flow.hpp"

#include <algorithm>
#include <map>
#include <set>

#include "tessera/engine/engine.hpp"

namespace tessera {
namespace {

using Kind = Action::Kind;

bool adds_gradients(const Action& action) {
  return action.kind == Kind::backward || action.kind == Kind::weight_gradient;
}

/// Units of a piece, each once, in the order in which their gradients are complete: what the head shares with
/// the embedding is complete when the embedding is.
std::vector<std::size_t> completed(const UnitOrder& order) {
  std::vector<std::size_t> units;
  for (const auto& visit : order.forward) {
    for (const std::size_t unit : visit) {
      if (std::ranges::find(units, unit) == units.end()) units.push_back(unit);
    }
  }
  std::ranges::reverse(units);
  return units;
}

/// Each bucket is complete at the last of the visits that have it; `gradients` keeps those that none has.
void complete_at_last(std::vector<WeightVisit>& visits, std::vector<std::size_t>& gradients) {
  std::set<std::size_t> seen;
  for (auto visit = visits.rbegin(); visit != visits.rend(); ++visit)
    std::erase_if(visit->completes, [&](std::size_t bucket) { return !seen.insert(bucket).second; });
  std::erase_if(gradients, [&](std::size_t bucket) { return seen.contains(bucket); });
}

}  // namespace

std::function<int(const Parameter&)> unit_numbers(Model& model, const EngineLayout& layout) {
  if (layout.zero_stage < 2) return nullptr;
  const std::vector<std::vector<Parameter*>> units = model.units();
  std::vector<int> number(units.size(), -1);
  for (std::size_t i = 0; i < units.size() && layout.zero_stage > 2; ++i) number[i] = static_cast<int>(i);
  for (int piece = 0; piece < model.num_pieces() && layout.zero_stage == 2; ++piece) {
    for (const std::size_t unit : completed(model.unit_order(piece))) {
      if (number[unit] < 0) number[unit] = piece;
    }
  }
  std::map<const Parameter*, int> of;
  for (std::size_t i = 0; i < units.size(); ++i) {
    for (const Parameter* p : units[i]) of[p] = number[i];
  }
  return [of = std::move(of)](const Parameter& parameter) {
    const auto found = of.find(&parameter);
    TESSERA_CHECK(found != of.end(), "parameter ", parameter.name(),
                  " is in no unit of the model: Model::units() names all of them");
    return found->second;
  };
}

std::unique_ptr<ShardFlow> ShardFlow::make(Model& model, ParamStore& params, const EngineLayout& layout) {
  if (!params.shards().shares_gradient()) return nullptr;
  ZeroReshard reshard = layout.zero_reshard;
  if (reshard == ZeroReshard::automatic)
    reshard = layout.mesh && layout.mesh->shape().pp > 1 ? ZeroReshard::never : ZeroReshard::always;
  return std::unique_ptr<ShardFlow>(new ShardFlow(model, params, reshard));
}

ShardFlow::ShardFlow(Model& model, ParamStore& params, ZeroReshard reshard)
    : params_(params), reshard_(reshard) {
  const FlatLayout& flat = params_.layout();
  std::vector<std::vector<std::size_t>> buckets;  // of each unit
  for (const auto& unit : model.units()) {
    buckets.emplace_back();
    for (const Parameter* p : unit) {
      const std::size_t bucket = flat.slot_of(*p).bucket;
      if (std::ranges::find(buckets.back(), bucket) == buckets.back().end()) buckets.back().push_back(bucket);
    }
    std::ranges::sort(buckets.back());
  }
  const auto visits = [&](const std::vector<std::vector<std::size_t>>& order, int opens, auto&& wanted) {
    std::vector<WeightVisit> list;
    for (const auto& units : order) {
      WeightVisit visit{.opens = opens};
      for (const std::size_t unit : units) {
        for (const std::size_t bucket : buckets[unit]) {
          if (wanted(bucket)) visit.buckets.push_back(bucket);
          if (opens < 1) visit.completes.push_back(bucket);  // no forward pass
        }
      }
      if (!visit.buckets.empty()) list.push_back(std::move(visit));
    }
    return list;
  };
  const auto all = [](std::size_t) { return true; };
  for (int i = 0; i < model.num_pieces(); ++i) {
    const UnitOrder order = model.unit_order(i);
    Piece piece{.forward = {visits(order.forward, 1, all)},
                .backward = {visits(order.backward, -1, all)},
                .weight_gradient = {visits(order.weight_gradient, 0, [&](std::size_t bucket) {
                  return flat.buckets()[bucket].reads_main;
                })}};
    for (WeightVisit& visit : piece.forward.visits) {
      const bool again = std::ranges::any_of(piece.backward.visits, [&](const WeightVisit& other) {
        return std::ranges::find(other.buckets, visit.buckets[0]) != other.buckets.end();
      });
      if (!again) visit.opens = 0;
    }
    for (const std::size_t unit : completed(order)) {
      for (const std::size_t bucket : buckets[unit]) {
        std::erase(piece.gradients, bucket);  // of stage 2 that units share: complete with the last of them
        piece.gradients.push_back(bucket);
      }
    }
    for (Pass* pass : {&piece.backward, &piece.weight_gradient}) {
      pass->unread = piece.gradients;
      complete_at_last(pass->visits, pass->unread);
    }
    pieces_.push_back(std::move(piece));
  }
}

const ShardFlow::Pass& ShardFlow::pass_of(const Action& action) const {
  const Piece& piece = pieces_.at(static_cast<std::size_t>(action.chunk));
  return action.kind == Kind::forward           ? piece.forward
         : action.kind == Kind::weight_gradient ? piece.weight_gradient
                                                : piece.backward;
}

void ShardFlow::begin(const std::vector<Action>& column) {
  run_left_out();
  std::vector<std::vector<WeightVisit>> passes;
  for (const Action& action : column) passes.push_back(pass_of(action).visits);
  params_.walk().begin(passes, reshard_);
  column_ = column;
  done_ = 0;
}

void ShardFlow::begin_gradients(int chunk) {
  params_.gradient().passes().begin(pieces_.at(static_cast<std::size_t>(chunk)).gradients);
  in_gradients_ = true;
}

void ShardFlow::end_pass() {
  // What a rank without samples left out. Sums wait for sums before them and gathers for the other ranks, so
  // both come in the order of a rank that computes.
  GradientPasses gradients = params_.gradient().passes();
  if (in_gradients_) gradients.complete(pass_of(column_.at(done_)).unread);
  while (const WeightVisit* visit = params_.walk().advance()) {
    if (in_gradients_) gradients.complete(visit->completes);
  }
  params_.walk().end_pass();
  if (std::exchange(in_gradients_, false)) gradients.end();
  ++done_;
}

void ShardFlow::end() {
  params_.walk().end();
  column_.clear();
  done_ = 0;
}

void ShardFlow::run_left_out() {
  while (done_ < column_.size()) skip_pass();
}

void ShardFlow::skip_pass() {
  const Action& action = column_.at(done_);
  if (adds_gradients(action) && !in_gradients_) begin_gradients(action.chunk);
  end_pass();
}

void ShardFlow::abandon() {
  run_left_out();
  end();
}

}  // namespace tessera
