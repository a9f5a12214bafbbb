#include "tessera/optim/weight_walk.hpp"

#include <algorithm>
#include <map>
#include <utility>

namespace tessera {
namespace {

bool has(const WeightVisit& visit, std::size_t bucket) {
  return std::ranges::find(visit.buckets, bucket) != visit.buckets.end();
}

}  // namespace

WeightWalk::WeightWalk(const FlatLayout& layout, const Shards& shards, Weights& weights)
    : layout_(layout), shards_(shards), weights_(weights) {
  if (!active()) return;
  for (std::size_t i = 0; i < layout_.buckets().size(); ++i) free(i);
}

WeightWalk::~WeightWalk() {
  if (!active()) return;
  for (const ParamSlot& slot : layout_.slots()) slot.parameter->set_gate(nullptr);
}

void WeightWalk::begin(const std::vector<std::vector<WeightVisit>>& passes, ZeroReshard reshard) {
  if (!active()) return;
  TESSERA_ENSURE(InternalError, holds_ == 0, "a call began while all weights are held (WeightWalk::Hold)");
  abandon();
  visits_.clear();
  ends_.clear();
  for (const auto& pass : passes) {
    for (const WeightVisit& visit : pass) visits_.push_back({visit});
    ends_.push_back(visits_.size());
  }
  pass_ = next_ = 0;
  walking_ = true;
  find_freed(reshard);
}

/// What is needed two visits later is kept, as the next one's weights are fetched before this one's go.
void WeightWalk::find_freed(ZeroReshard reshard) {
  std::map<std::size_t, std::size_t> next;  // use of each bucket
  for (std::size_t i = visits_.size(); i-- > 0;) {
    for (const std::size_t bucket : visits_[i].buckets) {
      const auto use = next.find(bucket);
      const std::size_t distance = use == next.end() ? 0 : use->second - i;
      if (distance == 0 || distance > 2) visits_[i].freed.push_back(bucket);
      if (distance > 2) visits_[i].later.push_back(bucket);
      next[bucket] = i;
    }
  }
  if (reshard != ZeroReshard::never) return;
  std::map<std::size_t, int> open;  // forward passes whose backward pass is to come
  for (Visit& visit : visits_) {
    for (const std::size_t bucket : visit.buckets) {
      int& count = open[bucket];
      count = std::max(0, count + visit.opens);
      if (count > 0 && std::ranges::find(visit.later, bucket) != visit.later.end())
        std::erase(visit.freed, bucket);
    }
  }
}

void WeightWalk::come_to(std::size_t bucket) {
  const std::string& name = layout_.slots()[layout_.buckets()[bucket].first_slot].parameter->name();
  TESSERA_CHECK(
      walking_, "each data rank holds a share of the weights of ", name,
      " (parallel.zero_stage 3), and nobody has gathered them: Weights::whole() gives one parameter, "
      "WeightWalk::Hold all of them");
  const std::size_t end = pass_ < ends_.size() ? ends_[pass_] : next_;
  std::size_t to = next_;
  while (to < end && !has(visits_[to], bucket)) ++to;
  TESSERA_CHECK(
      to < end, "the weights of ", name,
      " are read where this pass has no use of them any more: Model::unit_order says in which order a "
      "pass reads its units");
  while (next_ <= to) enter(next_);
}

void WeightWalk::enter(std::size_t visit) {
  if (visit > 0) {
    for (const std::size_t bucket : visits_[visit - 1].freed) free(bucket);
  }
  for (const std::size_t bucket : visits_[visit].buckets) weights_.fetch(bucket);
  if (visit + 1 < visits_.size()) {
    for (const std::size_t bucket : visits_[visit + 1].buckets) weights_.fetch(bucket);
  }
  for (const std::size_t bucket : visits_[visit].buckets) weights_.arrive(bucket);
  next_ = visit + 1;
}

void WeightWalk::free(std::size_t bucket) {
  weights_.release(bucket, [this, bucket] { come_to(bucket); });
}

const WeightVisit* WeightWalk::advance() {
  if (!walking_) return nullptr;
  TESSERA_ENSURE(InternalError, pass_ < ends_.size(), "a pass more than the walk has");
  if (next_ == ends_[pass_]) return nullptr;
  enter(next_);
  return &visits_[next_ - 1];
}

void WeightWalk::end_pass() {
  if (!walking_) return;
  while (advance() != nullptr) {
  }
  ++pass_;
}

void WeightWalk::end() {
  if (!walking_) return;
  TESSERA_ENSURE(InternalError, pass_ == ends_.size(), "a walk ends before its last pass");
  walking_ = false;
  for (std::size_t i = 0; i < layout_.buckets().size(); ++i) {
    if (weights_.fetched(i)) free(i);
  }
}

void WeightWalk::abandon() {
  while (walking_ && pass_ < ends_.size()) end_pass();
  end();
}

WeightWalk::Hold::Hold(WeightWalk& walk) : walk_(walk) {
  if (!walk_.active()) return;
  walk_.abandon();
  if (walk_.holds_++ > 0) return;
  const std::size_t count = walk_.layout_.buckets().size();
  for (std::size_t i = count; i-- > 0;) walk_.weights_.fetch(i);
  for (std::size_t i = count; i-- > 0;) walk_.weights_.arrive(i);
}

WeightWalk::Hold::~Hold() {
  if (!walk_.active() || --walk_.holds_ > 0) return;
  for (std::size_t i = 0; i < walk_.layout_.buckets().size(); ++i) walk_.free(i);
}

}  // namespace tessera
