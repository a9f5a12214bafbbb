// What an update acts on: which elements, in which cohort, and what of them counts in the norm.

#include <algorithm>
#include <map>
#include <tuple>

#include "tessera/ops/optimizer.hpp"
#include "tessera/ops/reduce.hpp"
#include "tessera/optim/optimizer.hpp"

namespace tessera {

bool Optimizer::frozen(const Parameter& parameter) const {
  return groups_.freezes(parameter) || store_.frozen(parameter);
}

/// Follows what the store has gradients of. A parameter that is left alone stops to count updates.
void Optimizer::find_active() {
  std::vector<bool> active = store_.gradient().trained();
  for (std::size_t i = 0; i < active.size(); ++i) {
    active[i] = active[i] && !excluded_[i];
  }
  if (active != active_) select(active);
}

void Optimizer::select(const std::vector<bool>& active) {
  TESSERA_CHECK(under_way_.empty(), "what is trained has changed while ", under_way_.size(),
                " updates are under way: finish_step() takes their results first");
  const auto before = std::tuple(had_, missed_, active_);
  for (std::size_t i = 0; i < active.size(); ++i) {
    const bool was = !active_.empty() && active_[i];
    if (was && !active[i]) had_[i] = updates_ - missed_[i];
    if (!was && active[i]) missed_[i] = updates_ - had_[i];
  }
  active_ = active;
  try {
    find_cohorts();
  } catch (const Error&) {
    std::tie(had_, missed_, active_) = before;  // the next update is to find the same again
    throw;
  }
  find_parts();
  find_counted();
  squares_of_ = -1;
}

void Optimizer::find_cohorts() {
  std::map<Cohort, std::uint8_t> places;
  const auto cohort_of = [&](std::size_t i) {
    return Cohort{groups_.group_of(*store_.slots()[i].parameter), missed_[i]};
  };
  for (std::size_t i = 0; i < active_.size(); ++i) {
    if (active_[i]) places.try_emplace(cohort_of(i));
  }
  TESSERA_CHECK(
      places.size() <= kMostGroups, places.size(),
      " sets of parameters differ in their group or in the number of updates they had; an optimizer "
      "takes up to ",
      kMostGroups, ": unfreeze more parameters at a time, or use fewer groups");
  for (Applied& applied : applied_) applied.cohorts.clear();
  for (auto& [cohort, place] : places) {
    std::vector<Cohort>& cohorts = applied_[applied_of_[cohort.group]].cohorts;
    place = static_cast<std::uint8_t>(cohorts.size());
    cohorts.push_back(cohort);
  }
  cohort_.assign(active_.size(), kNoGroup);
  for (std::size_t i = 0; i < active_.size(); ++i) {
    if (active_[i]) cohort_[i] = places.at(cohort_of(i));
  }
  for (std::size_t i = 0; i < applied_.size(); ++i) {
    std::vector<Cohort>& cohorts = applied_[i].cohorts;
    const auto group = std::find(applied_of_.begin(), applied_of_.end(), i) - applied_of_.begin();
    if (cohorts.empty()) cohorts.push_back({static_cast<std::size_t>(group), 0});
    applied_[i].factors = ops::make_group_factors(ctx_, static_cast<std::int64_t>(cohorts.size()));
  }
}

std::int64_t Optimizer::updates_of(const Parameter& parameter) const {
  const std::size_t i = store_.layout().index_of(parameter);
  return active_[i] ? updates_ - missed_[i] : had_[i];
}

void Optimizer::set_updates_of(const std::function<std::int64_t(const Parameter&)>& updates) {
  for (std::size_t i = 0; i < active_.size(); ++i) {
    const Parameter& parameter = *store_.slots()[i].parameter;
    const std::int64_t count = updates(parameter);
    TESSERA_CHECK(count >= 0 && count <= updates_, parameter.name(), " cannot have had ", count,
                  " updates of ", updates_);
    had_[i] = count;
    missed_[i] = updates_ - count;
  }
  select(active_);
}

void Optimizer::find_parts() {
  changes_.assign(store_.layout().buckets().size(), false);
  for (Applied& applied : applied_) find_parts(applied);
}

void Optimizer::find_parts(Applied& applied) {
  static_assert(FlatLayout::kAlignment % kGroupBlock == 0, "parameters and shares are whole blocks");
  const FlatLayout& layout = store_.layout();
  const Shards& shards = store_.shards();
  struct Updated {
    Range place;  ///< in the state, whole blocks
    std::uint8_t cohort;
  };
  std::vector<Updated> updated;
  applied.parts.clear();
  for (std::size_t i = 0; i < layout.slots().size(); ++i) {
    const ParamSlot& slot = layout.slots()[i];
    if (!active_[i] || &applied_[applied_of_[groups_.group_of(*slot.parameter)]] != &applied) continue;
    changes_[slot.bucket] = true;
    const std::int64_t blocks = (slot.numel + kGroupBlock - 1) / kGroupBlock;
    const Range own = overlap({slot.offset, blocks * kGroupBlock}, shards.updated(slot.bucket));
    const Range place = shards.in_state(slot.bucket, own);
    if (place.count > 0) updated.push_back({place, cohort_[i]});
  }
  // Without what is left alone before the first and after the last element to update.
  const auto add = [&](std::size_t bucket, const Range& run) {
    const Range place = shards.in_state(bucket, run);
    std::int64_t first = place.end(), last = place.begin;
    for (const Updated& each : updated) {
      const Range part = overlap(each.place, place);
      if (part.count == 0) continue;
      first = std::min(first, part.begin);
      last = std::max(last, part.end());
    }
    if (first < last) applied.parts.push_back({bucket, {run.begin + first - place.begin, last - first}});
  };
  const auto& buckets = layout.buckets();
  const bool split = std::any_of(buckets.begin(), buckets.end(),
                                 [&](const Bucket& bucket) { return store_.weights().splits(bucket); });
  if (shards.sharded() || split || store_.weights().main_away()) {
    for (std::size_t i = 0; i < buckets.size(); ++i) add(i, shards.updated(i));
  } else if (!buckets.empty()) {
    add(0, {0, store_.numel()});
  }
  const std::int64_t blocks = shards.state_numel() / kGroupBlock;
  if (ctx_.device().is_meta()) {  // nobody reads it, and of a large model it is hundreds of megabytes
    applied.of_block = Tensor::empty(ctx_, {blocks}, DType::u8);
    return;
  }
  std::vector<std::uint8_t> of_block(static_cast<std::size_t>(blocks), kNoGroup);
  for (const Updated& each : updated)
    std::fill_n(of_block.begin() + each.place.begin / kGroupBlock, each.place.count / kGroupBlock,
                each.cohort);
  applied.of_block = Tensor::from(ctx_, of_block, {blocks});
}

void Optimizer::find_counted() {
  const FlatLayout& layout = store_.layout();
  std::vector<Range> runs, in_sum;
  for (std::size_t i = 0; i < layout.buckets().size(); ++i) {
    const Bucket& bucket = layout.buckets()[i];
    const auto slots = layout.slots_of(bucket);
    std::vector<Range> counted;
    for (std::size_t j = 0; j < slots.size(); ++j) {
      if (!active_[bucket.first_slot + j]) continue;
      // With the gap after it, which is zero: so neighbours become one run.
      const std::int64_t end = j + 1 < slots.size() ? slots[j + 1].offset : bucket.run().end();
      for (Range run : store_.counted(*slots[j].parameter)) {
        if (run.end() == slots[j].numel) run.count = end - slots[j].offset - run.begin;
        append(counted, {slots[j].offset + run.begin, run.count});
      }
    }
    for (const Range& run : counted) {
      const Range own = overlap(run, store_.shards().share(i));
      if (own.count == 0) continue;
      runs.push_back({own.begin, own.count});
      in_sum.push_back({store_.shards().in_state(i, own).begin, own.count});
    }
  }
  counted_ = ops::make_sum_runs(ctx_, runs);
  counted_in_sum_ = store_.shards().sharded() ? ops::make_sum_runs(ctx_, in_sum) : counted_;
  find_counted_in_tiles(in_sum);
}

void Optimizer::find_counted_in_tiles(const std::vector<Range>& runs) {
  counted_in_tiles_.clear();
  const auto& place = store_.place();
  if (!place || place->config.gradients == OffloadTo::none) return;
  const std::int64_t size = place->config.tile, all = store_.shards().state_numel();
  for (std::int64_t begin = 0; begin < all; begin += size) {
    const Range tile{begin, std::min(size, all - begin)};
    std::vector<Range> inside;
    for (const Range& run : runs) {
      const Range part = overlap(run, tile);
      if (part.count > 0) inside.push_back({part.begin - begin, part.count});
    }
    if (!inside.empty()) counted_in_tiles_.emplace_back(tile, ops::make_sum_runs(ctx_, inside));
  }
}

}  // namespace tessera
