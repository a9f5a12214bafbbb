#include "optim/reduction.hpp"

#include <map>

#include "optim/runs.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {
namespace {

bool several(const Communicator* group) { return group != nullptr && group->size() > 1; }

}  // namespace

GradientReduction::GradientReduction(const ExecCtx& ctx, const FlatLayout& layout, const StoreGroups& groups,
                                     const Shards& shards, const GradientMemory& grad,
                                     std::vector<bool> frozen)
    : ctx_(ctx),
      layout_(layout),
      shards_(shards),
      grad_(grad),
      frozen_(std::move(frozen)),
      sent_(groups.sent) {
  find_sums(groups);
  if (shards_.shares_gradient()) forget_memory();
}

void GradientReduction::find_sums(const StoreGroups& groups) {
  std::vector<Range> partial, tied;
  std::map<int, std::vector<Range>> copied;  // by number of copies: in one order on all ranks
  for (std::size_t i = 0; i < layout_.slots().size(); ++i) {
    if (frozen_[i]) continue;
    const ParamSlot& slot = layout_.slots()[i];
    const Parameter& p = *slot.parameter;
    if (p.traits().partial_over_tensor) partial.push_back(slot.run());
    if (p.traits().tied) tied.push_back(slot.run());
    for (const Segment& segment : p.placement().segments()) {
      if (segment.copies == 1) continue;
      for (const Range& run : runs_of(p.placement(), segment)) {
        append(copied[segment.copies], {slot.offset + run.begin, run.count});
      }
    }
  }
  if (several(groups.tensor)) add_sum(groups.tensor, partial);
  for (const auto& [copies, runs] : copied) {
    TESSERA_CHECK(groups.tensor_block, "rows are held by ", copies,
                  " tensor ranks each: a ParamStore needs StoreGroups::tensor_block to sum their gradients");
    add_sum(&groups.tensor_block(copies), runs);
  }
  if (several(groups.embedding)) add_sum(groups.embedding, tied);
}

void GradientReduction::add_sum(Communicator* group, const std::vector<Range>& wanted) {
  ReplicatedSum sum{group, {}, 0};
  for (const Range& run : wanted) {
    for (std::size_t i = 0; i < layout_.buckets().size(); ++i) {
      const Range own = overlap(run, shards_.updated(i));
      if (own.count > 0) append(sum.runs, shards_.shares_gradient() ? shards_.in_state(i, own) : own);
    }
  }
  for (const Range& run : sum.runs) sum.elements += run.count;
  if (sum.elements > 0) sums_.push_back(std::move(sum));
}

void GradientReduction::open(const std::function<int(const Parameter&)>& contributions) {
  started_ = 0;
  running_.clear();
  counting_ = static_cast<bool>(contributions);
  if (shards_.shares_gradient()) return forget_memory();
  if (!counting_) return;
  remaining_.assign(layout_.slots().size(), 0);
  incomplete_.assign(layout_.buckets().size(), 0);
  for (std::size_t i = 0; i < remaining_.size(); ++i) {
    const ParamSlot& slot = layout_.slots()[i];
    remaining_[i] = frozen_[i] ? 0 : contributions(*slot.parameter);
    if (remaining_[i] > 0) ++incomplete_[slot.bucket];
  }
}

void GradientReduction::ready(const Parameter& parameter) {
  const std::size_t i = layout_.index_of(parameter);
  if (shards_.shares_gradient() ? !in_pass_ : !counting_) return;
  TESSERA_CHECK(remaining_[i] > 0, "parameter ", parameter.name(),
                " got more contributions than begin_call was told: its gradient may be on its way already");
  if (--remaining_[i] > 0) return;
  --incomplete_[layout_.slots()[i].bucket];
  if (in_pass_) return start_next();
  while (started_ < incomplete_.size() && incomplete_[started_] == 0) start(started_);
}

void GradientReduction::start(std::size_t bucket) {
  const Bucket& b = layout_.buckets()[bucket];
  for (std::size_t i = b.first_slot; i < b.first_slot + b.slots; ++i) {
    const Parameter& p = *layout_.slots()[i].parameter;
    if (!frozen_[i] && !p.has_grad()) ops::fill_zero(ctx_, p.grad());
  }
  ++started_;
  Communicator* const data = shards_.ranks(bucket).data;
  if (data == nullptr || !trains(bucket)) return;
  const Range own = shards_.updated(bucket);
  running_.push_back(start_sum(*data, grad_.read(b.run()), {own.begin - b.begin, own.count}));
}

GradientReduction::Sum GradientReduction::start_sum(Communicator& group, const Tensor& whole,
                                                    const Range& own) const {
  const bool rounds = sent_ != DType::f32 && group.size() > 1;
  Sum sum{.held = rounds ? ops::cast(ctx_, whole, sent_) : whole,
          .target = whole.narrow(0, own.begin, own.count),
          .result = {},
          .pending = {}};
  sum.result = sum.held.narrow(0, own.begin, own.count);
  sum.pending = own.count == whole.numel() ? group.all_reduce(ctx_, sum.held)
                                           : group.reduce_scatter(ctx_, sum.held, sum.result);
  return sum;
}

void GradientReduction::finish_sum(const Sum& sum) const {
  sum.pending.wait(ctx_);
  if (sum.result.dtype() != DType::f32) ops::axpby(ctx_, 1.0f, sum.result, 0.0f, sum.target);
}

void GradientReduction::finish_buckets() {
  while (started_ < layout_.buckets().size()) start(started_);
  for (const Sum& sum : running_) finish_sum(sum);
  running_.clear();
  counting_ = false;
}

void GradientReduction::finish() {
  if (shards_.shares_gradient()) {
    finish_shares();
  } else {
    finish_buckets();
  }
  sum_over_copies();
  for (const ReplicatedSum& sum : sums_) run(sum);
}

/// Once for all micro-batches: shares of other groups of data ranks are of other samples.
void GradientReduction::sum_over_copies() const {
  std::vector<Sum> sums;
  for (std::size_t i = 0; i < layout_.buckets().size(); ++i) {
    Communicator* const copies = shards_.ranks(i).copies;
    if (copies == nullptr || !trains(i)) continue;
    const Range own = shards_.updated(i);
    const Range place = shards_.shares_gradient() ? shards_.in_state(i, own) : own;
    if (!grad_.away()) {
      sums.push_back(start_sum(*copies, grad_.read(place), {0, place.count}));
      continue;
    }
    grad_.change(place, true, [&](const Tensor& values, const Range& where) {
      finish_sum(start_sum(*copies, values, {0, where.count}));
    });
  }
  for (const Sum& sum : sums) finish_sum(sum);
}

void GradientReduction::abandon() {
  if (shards_.shares_gradient()) {
    end_pass();
    settle_shares(0);
    forget_memory();
  } else if (counting_) {
    finish_buckets();
  }
}

void GradientReduction::run(const ReplicatedSum& sum) const {
  const Tensor packed = Tensor::empty(ctx_, {sum.elements}, DType::f32);
  std::int64_t place = 0;
  for (const Range& run : sum.runs) {
    ops::copy(ctx_, grad_.read(run), packed.narrow(0, place, run.count));
    place += run.count;
  }
  sum.group->all_reduce(ctx_, packed).wait(ctx_);
  place = 0;
  for (const Range& run : sum.runs) {
    grad_.change(run, false, [&](const Tensor& values, const Range& where) {
      ops::copy(ctx_, packed.narrow(0, place + where.begin - run.begin, where.count), values);
    });
    place += run.count;
  }
}

}  // namespace tessera
