/// A stage's column, walked on the meta device: what its passes keep and need at once, and the messages
/// between stages.

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "engine/dry_terms.hpp"
#include "tessera/pipeline/executor.hpp"

namespace tessera {
namespace {

/// Passes that hold what was recorded of them. The executor's messages are real ones, of the meta device.
class RecordedStage final : public StageProgram {
 public:
  /// `gathered`: bytes of weights that are whole when each pass begins, or nothing.
  RecordedStage(const ExecCtx& ctx, const std::vector<PieceRecord>& pieces, std::int64_t batch_bytes,
                std::vector<std::int64_t> gathered)
      : ctx_(ctx), pieces_(pieces), batch_bytes_(batch_bytes), gathered_(std::move(gathered)) {}

  std::vector<Tensor> forward(int chunk, int micro_batch, std::vector<Tensor> inputs) override {
    if (seen_.insert(micro_batch).second) batch_ += batch_bytes_;
    do_pass(of(chunk).forward, chunk, micro_batch);
    inputs.clear();
    return empty_tensors(ctx_, of(chunk).outputs);
  }
  std::vector<Tensor> backward(int chunk, int micro_batch, std::vector<Tensor> grads, bool weights) override {
    do_pass(of(chunk).backward, chunk, micro_batch);
    if (weights) held_.erase({chunk, micro_batch});
    grads.clear();
    return empty_tensors(ctx_, of(chunk).inputs);
  }
  void weight_gradient(int chunk, int micro_batch) override {
    do_pass(of(chunk).weight_gradient, chunk, micro_batch);
    held_.erase({chunk, micro_batch});
  }
  std::vector<Port> inputs(int chunk, int) const override { return of(chunk).inputs; }
  std::vector<Port> outputs(int chunk, int) const override { return of(chunk).outputs; }

  ColumnRecord record() const {
    ColumnRecord result{.activations = most_held_, .batch = batch_, .most_in_flight = most_in_flight_};
    // The peak is the sum of the parts; what is held at most need not be held at the peak.
    const std::int64_t rest = std::max<std::int64_t>(0, peak_ - most_held_ - batch_);
    result.messages = std::min(messages_at_peak_, rest);
    result.temporary = rest - result.messages;
    return result;
  }

 private:
  const PieceRecord& of(int chunk) const { return pieces_[static_cast<std::size_t>(chunk)]; }

  void do_pass(const PassRecord& pass, int chunk, int micro_batch) {
    const std::int64_t gathered = passes_ < gathered_.size() ? gathered_[passes_] : 0;
    ++passes_;
    look(pass.peak + pass.passing + gathered);
    std::int64_t& held = held_[{chunk, micro_batch}];
    all_held_ += pass.kept - held;
    held = pass.kept;
    most_held_ = std::max(most_held_, all_held_);
    most_in_flight_ = std::max(most_in_flight_, static_cast<int>(held_.size()));
    look(0);
  }
  void look(std::int64_t temporary) {
    const auto messages = static_cast<std::int64_t>(ctx_.allocator->stats().used_bytes);
    const std::int64_t now = all_held_ + batch_ + messages + temporary;
    if (now <= peak_) return;
    peak_ = now;
    messages_at_peak_ = messages;
  }

  const ExecCtx& ctx_;
  const std::vector<PieceRecord>& pieces_;
  std::int64_t batch_bytes_;
  std::vector<std::int64_t> gathered_;
  std::size_t passes_ = 0;
  std::set<int> seen_;  // micro-batches whose tokens are here
  std::map<std::pair<int, int>, std::int64_t> held_;
  std::int64_t all_held_ = 0, most_held_ = 0, batch_ = 0, peak_ = 0, messages_at_peak_ = 0;
  int most_in_flight_ = 0;
};

/// `to` micro-batches, from two shorter steps.
std::int64_t extend(std::int64_t a, std::int64_t at_a, std::int64_t b, std::int64_t at_b, std::int64_t to) {
  return at_b + (at_b - at_a) * (to - b) / (b - a);
}

}  // namespace

ColumnRecord run_column(const Schedule& schedule, int stage, const std::vector<PieceRecord>& pieces,
                        std::int64_t batch_bytes, const WalkShards& walk) {
  const ExecCtx ctx = ExecCtx::meta();
  const auto pipeline = schedule.stages == 1 ? make_self_communicator("pp")
                                             : make_absent_communicator(stage, schedule.stages, "pp");
  const ShardRecord shards = walk ? walk(schedule.actions[static_cast<std::size_t>(stage)]) : ShardRecord();
  RecordedStage program(ctx, pieces, batch_bytes, shards.gathered);
  PipelineExecutor(ctx, *pipeline).run(schedule, program);
  ColumnRecord record = program.record();
  record.sent = static_cast<std::int64_t>(pipeline->stats().bytes_sent);
  record.shared = shards.sent;
  return record;
}

namespace detail {

void add_traffic(std::vector<TrafficTerm>& terms, const TrafficTerm& more) {
  if (more.bytes == 0) return;
  const auto same = std::find_if(terms.begin(), terms.end(), [&](const TrafficTerm& term) {
    return term.axis == more.axis && term.name == more.name;
  });
  if (same == terms.end()) {
    terms.push_back(more);
  } else {
    same->bytes += more.bytes;
  }
}

void take_crossed(std::vector<TrafficTerm>& terms, Elsewhere& elsewhere) {
  elsewhere.to_device += bytes_of(terms, kToDevice);
  elsewhere.to_host += bytes_of(terms, kToHost);
  std::erase_if(terms,
                [](const TrafficTerm& term) { return term.axis == kToDevice || term.axis == kToHost; });
}

Columns::Columns(PipelineSchedule kind, int stages, int chunks, std::int64_t micro_batches)
    : micro_batches_(micro_batches) {
  const std::int64_t settled = std::int64_t{4} * stages * chunks;  // a multiple of the stages
  if (micro_batches <= 2 * settled) {
    schedules_.push_back(make_schedule(kind, stages, chunks, static_cast<int>(micro_batches)));
    return;
  }
  for (const std::int64_t length : {settled, 2 * settled})
    schedules_.push_back(make_schedule(kind, stages, chunks, static_cast<int>(length)));
}

ColumnRecord Columns::run(int stage, const std::vector<PieceRecord>& pieces, std::int64_t batch_bytes,
                          const WalkShards& walk) const {
  ColumnRecord last = run_column(schedules_.back(), stage, pieces, batch_bytes, walk);
  if (schedules_.size() == 1) return last;
  const ColumnRecord first = run_column(schedules_.front(), stage, pieces, batch_bytes, walk);
  const std::int64_t a = schedules_.front().micro_batches, b = schedules_.back().micro_batches;
  for (const auto part : {&ColumnRecord::activations, &ColumnRecord::temporary, &ColumnRecord::messages,
                          &ColumnRecord::batch, &ColumnRecord::sent})
    last.*part = extend(a, first.*part, b, last.*part, micro_batches_);
  for (TrafficTerm& term : last.shared)
    term.bytes = extend(a, bytes_of(first.shared, term.axis), b, term.bytes, micro_batches_);
  last.most_in_flight =
      static_cast<int>(extend(a, first.most_in_flight, b, last.most_in_flight, micro_batches_));
  return last;
}

std::vector<MemoryTerm> memory_of(std::vector<MemoryTerm> persistent, const ColumnRecord& column,
                                  std::int64_t once) {
  std::vector<MemoryTerm> terms = std::move(persistent);
  // Sums and update come when the passes are over; the batch is still there then.
  const std::int64_t more = std::max<std::int64_t>(0, once + column.batch - column.peak());
  terms.push_back({"activations", column.activations});
  terms.push_back({"temporary", column.temporary + more});
  if (column.messages > 0) terms.push_back({"messages", column.messages});
  terms.push_back({"batch", column.batch});
  return terms;
}

std::vector<TrafficTerm> traffic_of(const std::vector<PieceRecord>& pieces, std::int64_t micro_batches,
                                    const ColumnRecord& column) {
  std::vector<TrafficTerm> terms;
  for (const PieceRecord& piece : pieces) {
    for (const PassRecord* pass : {&piece.forward, &piece.backward, &piece.weight_gradient}) {
      for (TrafficTerm term : pass->sent) {
        if (term.axis.starts_with("dp") || term.axis.starts_with("edp")) continue;  // the column's, below
        term.bytes *= micro_batches;
        add_traffic(terms, term);
      }
    }
  }
  for (const TrafficTerm& term : column.shared) add_traffic(terms, term);
  add_traffic(terms, {"pp", "activations and gradients", column.sent});
  return terms;
}

}  // namespace detail
}  // namespace tessera
