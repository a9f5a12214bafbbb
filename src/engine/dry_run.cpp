#include "tessera/engine/dry_run.hpp"
#include "tessera/base/config_file.hpp"

#include <algorithm>

#include "engine/dry_terms.hpp"
#include "engine/loss_plan.hpp"
#include "engine/shard_flow.hpp"
#include "engine/stage.hpp"
#include "tessera/autograd/activation_offload.hpp"
#include "tessera/device/trace.hpp"

namespace tessera {
namespace {

constexpr std::string_view kCommunication = "communication ";

std::int64_t used(const ExecCtx& ctx) { return static_cast<std::int64_t>(ctx.allocator->stats().used_bytes); }

/// "all_reduce tp" on the lane of tp: "all-reduce".
std::string operation_of(const std::string& name) {
  std::string operation = name.substr(0, name.find(' '));
  std::replace(operation.begin(), operation.end(), '_', '-');
  return operation;
}

void note(const TraceLane& lane, const Work& work, std::string_view phase, WorkRecord& record) {
  if (lane.name.starts_with(kCommunication)) {
    detail::add_traffic(record.sent, {lane.name.substr(kCommunication.size()),
                                      detail::concat(phase, ", ", operation_of(work.name)),
                                      static_cast<std::int64_t>(work.bytes)});
  } else if (work.kind != WorkKind::communication) {
    record.flops += work.flops;
    record.bytes += work.bytes;
  }
}

/// Does `work` and writes down what it was.
template <typename Record, typename Do>
void record_work(const ExecCtx& ctx, std::string_view phase, Record& record, Do&& work) {
  const auto trace = std::make_shared<Trace>(*ctx.stream);
  ctx.allocator->reset_peak();
  const std::int64_t before = used(ctx);
  ctx.stream->set_trace(trace);
  work();
  ctx.stream->set_trace(nullptr);
  const auto peak = static_cast<std::int64_t>(ctx.allocator->stats().peak_used_bytes) - before;
  record.peak = std::max(record.peak, peak);
  for (const TraceLane& lane : trace->lanes()) {
    for (const TimedWork& timed : lane.work) note(lane, timed.work, phase, record);
  }
}

std::int64_t bytes_of(const Tensor& tensor) {
  return tensor ? static_cast<std::int64_t>(tensor.nbytes()) : 0;
}

}  // namespace

MicroBatchSize detail::size_of(const Config& config, std::int64_t samples) {
  const SampleLengths lengths = sample_lengths(config);
  return {samples, lengths.tokens, lengths.encoder};
}

DryRank::DryRank(const MakeModel& make, EngineOptions options, const MeshShape& mesh, int rank,
                 const MicroBatchSize& micro_batch, const DryDevice& device)
    : micro_batch_(micro_batch) {
  order_.kind = options.layout.schedule;
  order_.stages = mesh.pp;
  order_.chunks = options.layout.chunks;
  options.layout.mesh = ProcessMesh::alone(mesh, rank);
  options.micro_batch_size = micro_batch.batch;
  auto model = make(*options.layout.mesh);
  options.offload.memory_apart = options.offload.memory_apart || device.memory_apart;
  ExecCtx ctx = ExecCtx::meta();
  ctx.logit_bytes = device.logit_bytes;
  engine_ = std::make_unique<Engine>(std::move(model), options, ctx);
}

DryRank::~DryRank() = default;

std::int64_t DryRank::parameters() const {
  std::int64_t count = 0;
  for (const Parameter* p : engine_->params().parameters()) count += p->shape().numel();
  return count;
}

std::vector<MemoryTerm> DryRank::persistent() const {
  const ParamStore& params = engine_->params();
  const std::int64_t copies = bytes_of(params.weights().model_buffer()),
                     gradients = static_cast<std::int64_t>(params.gradient().persistent_bytes());
  const auto all = static_cast<std::int64_t>(params.persistent_bytes());
  const auto state = static_cast<std::int64_t>(engine_->optimizer().persistent_bytes());
  std::vector<MemoryTerm> terms{{"weights", all - copies - gradients}};
  if (copies > 0) terms.push_back({"16-bit weights", copies});
  terms.push_back({"gradients", gradients});
  terms.push_back({"optimizer", state});
  terms.push_back({"tables", used(engine_->ctx()) - all - state});
  return terms;
}

Elsewhere DryRank::elsewhere() const {
  const auto& place = engine_->params().place();
  if (!place) return {};
  return {static_cast<std::int64_t>(place->in_memory), static_cast<std::int64_t>(place->on_disk)};
}

std::int64_t DryRank::host_bytes_of_pass() const {
  const auto& activations = engine_->ctx().activations;
  return activations ? static_cast<std::int64_t>(activations->host_bytes()) : 0;
}

DryRank::Crossed DryRank::crossed() const {
  const auto& place = engine_->params().place();
  if (!place) return {};
  return {place->link.bytes_to_device(), place->link.bytes_to_host()};
}

DryRank::Crossed DryRank::crossed_by_activations() const {
  const auto& activations = engine_->ctx().activations;
  if (!activations) return {};
  return {activations->link().bytes_to_device(), activations->link().bytes_to_host()};
}

void DryRank::add_crossed(std::vector<TrafficTerm>& terms, const Crossed& before, const Crossed& after) {
  const auto add = [&](std::string_view axis, std::uint64_t bytes) {
    detail::add_traffic(terms, {std::string(axis), "offload", static_cast<std::int64_t>(bytes)});
  };
  add(kToDevice, after.to_device - before.to_device);
  add(kToHost, after.to_host - before.to_host);
}

std::int64_t DryRank::batch_bytes() const {
  const std::int64_t before = used(engine_->ctx());
  const MicroBatch micro_batch = to_micro_batch(engine_->ctx(), blank_batch(micro_batch_, engine_->model()),
                                                engine_->context().part(micro_batch_.seq_length));
  return used(engine_->ctx()) - before;
}

/// Without what comes and goes among data ranks.
std::int64_t DryRank::held() const {
  ParamStore& params = engine_->params();
  return used(engine_->ctx()) - static_cast<std::int64_t>(params.weights().gathered_bytes() +
                                                          params.gradient().passes().held_bytes());
}

/// Two rounds of a piece's passes as they come in a long step: each begins with what the round before left.
void DryRank::begin_piece(int chunk, bool put_off) {
  if (!engine_->flow_) return;
  const auto action = [&](Action::Kind kind) { return Action{kind, chunk, 0}; };
  std::vector<Action> round{action(put_off ? Action::Kind::input_gradient : Action::Kind::backward)};
  if (put_off) round.push_back(action(Action::Kind::weight_gradient));
  round.insert(round.begin(), action(Action::Kind::forward));
  // Where weights are kept from forward to backward there is always a micro-batch between the two.
  const bool kept = engine_->flow_->keeps_weights();
  std::vector<Action> column;
  if (kept) column.push_back(action(Action::Kind::forward));
  for (int i = 0; i < (kept ? 2 : 3); ++i) column.insert(column.end(), round.begin(), round.end());
  if (kept) column.insert(column.end(), round.begin() + 1, round.end());
  engine_->flow_->begin(column);
  if (kept) engine_->flow_->end_pass();
}

ShardRecord DryRank::walk(const std::vector<Action>& column) {
  ShardRecord record;
  ShardFlow* const flow = engine_->flow_.get();
  if (flow == nullptr) return record;
  const Shards& shards = engine_->params().shards();
  std::vector<std::pair<const Communicator*, const char*>> groups;
  for (const DataRanks* ranks : {&shards.dense(), &shards.experts()}) {
    groups.emplace_back(ranks->data, "gradients, reduce-scatter");
    if (shards.shares_model()) groups.emplace_back(ranks->gathering, "weights, all-gather");
    if (engine_->mesh().shape().ep == 1) break;  // experts are shared out as all else
  }
  const auto sent = [&groups] {
    std::vector<std::int64_t> bytes;
    for (const auto& [group, what] : groups)
      bytes.push_back(static_cast<std::int64_t>(group->stats().bytes_sent));
    return bytes;
  };
  const std::vector<std::int64_t> sent_before = sent();
  const Crossed before = crossed();
  const auto gathered_now = [this] {
    return static_cast<std::int64_t>(engine_->params().weights().gathered_bytes());
  };
  flow->begin(column);
  for (std::size_t i = 0; i < column.size(); ++i) {
    const std::int64_t there = gathered_now();
    flow->skip_pass();
    // A recorded pass gathers nothing where weights are kept: it found them there (begin_piece).
    record.gathered.push_back(flow->keeps_weights() ? std::max(there, gathered_now()) : there);
  }
  flow->end();
  engine_->params().gradient().discard();
  const std::vector<std::int64_t> sent_now = sent();
  for (std::size_t i = 0; i < groups.size(); ++i)
    detail::add_traffic(record.sent,
                        {groups[i].first->name(), groups[i].second, sent_now[i] - sent_before[i]});
  add_crossed(record.sent, before, crossed());
  return record;
}

PieceRecord DryRank::run_piece(Stage& stage, int chunk, bool put_off) const {
  const ExecCtx& ctx = engine_->ctx();
  const Crossed crossed_before = crossed_by_activations();
  PieceRecord piece;
  const int place = order_.piece_of(engine_->mesh().coordinates().pp, chunk);
  if (place > 0) piece.inputs = stage.inputs(chunk, 0);
  if (place + 1 < order_.pieces()) piece.outputs = stage.outputs(chunk, 0);
  const auto passing = [&] {
    return static_cast<std::int64_t>(engine_->params().gradient().passes().held_bytes());
  };
  const std::int64_t before = held();
  std::vector<Tensor> values = empty_tensors(ctx, piece.inputs);
  piece.forward.passing = passing();
  record_work(ctx, "forward", piece.forward, [&] { values = stage.forward(chunk, 0, std::move(values)); });
  values.clear();
  piece.forward.kept = held() - before;
  values = empty_tensors(ctx, piece.outputs);
  piece.backward.passing = passing();
  record_work(ctx, "backward", piece.backward,
              [&] { values = stage.backward(chunk, 0, std::move(values), !put_off); });
  values.clear();
  piece.backward.kept = held() - before;
  Crossed after = crossed_by_activations();
  // In a pipeline other passes come between forward and backward, but for the last stage: nothing is counted
  // on to be still on the device.
  if (order_.pieces() > 1)
    after.to_device = crossed_before.to_device + after.to_host - crossed_before.to_host;
  add_crossed(piece.backward.sent, crossed_before, after);
  if (!put_off) return piece;
  piece.weight_gradient.passing = passing();
  record_work(ctx, "weight gradients", piece.weight_gradient, [&] { stage.weight_gradient(chunk, 0); });
  piece.weight_gradient.kept = held() - before;
  return piece;
}

std::vector<PieceRecord> DryRank::pieces(bool put_off) {
  const ExecCtx& ctx = engine_->ctx();
  Batch batch = blank_batch(micro_batch_, engine_->model());
  batch.global_targets = batch.batch * batch.seq_length;
  batch.global_sample_targets = batch.batch;
  engine_->model().reserve_positions(ctx, position_count(batch));
  Stage stage(ctx, engine_->model(), batch,
              LossPlan::mean(terms_of(engine_->model(), batch, 1), engine_->optimizer().loss_scale(),
                             engine_->mesh().coordinates().tp == 0),
              {.micro_batch_size = micro_batch_.batch,
               .on_gradient_ready =
                   [this](Parameter& p) {
                     if (engine_->flow_) engine_->params().gradient().ready(p);
                   },
               .context = engine_->context(),
               .flow = engine_->flow_.get()});
  engine_->params().gradient().begin_call();
  std::vector<PieceRecord> records;
  for (int chunk = 0; chunk < engine_->model().num_pieces(); ++chunk) {
    begin_piece(chunk, put_off);
    run_piece(stage, chunk, put_off);  // what is made once is made here
    records.push_back(run_piece(stage, chunk, put_off));
    if (engine_->flow_) engine_->flow_->abandon();
  }
  if (engine_->flow_) engine_->params().gradient().discard();
  return records;
}

WorkRecord DryRank::once() {
  const ExecCtx& ctx = engine_->ctx();
  WorkRecord record;
  if (engine_->flow_) {  // each bucket was reduced behind a pass
    engine_->params().gradient().begin_call();
    std::vector<Action> column;
    for (int chunk = 0; chunk < order_.chunks; ++chunk) column.push_back({Action::Kind::backward, chunk, 0});
    engine_->flow_->begin(column);
    engine_->flow_->abandon();
    engine_->params().gradient().passes().settle();  // as the walk has counted it
  }
  const Crossed before = crossed();
  record_work(ctx, "gradients", record, [&] {
    engine_->params().gradient().close_call();
    engine_->params().gradient().add_call(1.0);
  });
  record_work(ctx, "update", record, [&] {
    engine_->optimizer().launch_step([](std::int64_t) { return UpdateRates{1e-3, 0.0}; });
  });
  add_crossed(record.sent, before, crossed());
  Communicator& world = engine_->mesh().world();
  if (world.size() == 1) return record;
  // Engine::read_loss.
  const auto terms = static_cast<std::int64_t>(1 + engine_->model().extra_losses().size());
  const ExecCtx host = ExecCtx::cpu(1);
  const std::uint64_t sent = world.stats().bytes_sent;
  world.all_reduce(host, Tensor::from(host, std::vector<double>(static_cast<std::size_t>(terms)), {terms}))
      .wait(host);
  detail::add_traffic(record.sent,
                      {"world", "loss", static_cast<std::int64_t>(world.stats().bytes_sent - sent)});
  return record;
}

std::int64_t DryRank::agreement_bytes() {
  Communicator& world = engine_->mesh().world();
  const std::uint64_t before = world.stats().bytes_sent;
  Batch batch = blank_batch(micro_batch_, engine_->model());
  agree(engine_->mesh(), batch, engine_->about({.name = "Engine::step()"}, &batch, true));
  return static_cast<std::int64_t>(world.stats().bytes_sent - before);
}

std::int64_t bytes_of(const std::vector<MemoryTerm>& terms, std::string_view name) {
  std::int64_t sum = 0;
  for (const MemoryTerm& term : terms) sum += name.empty() || term.name == name ? term.bytes : 0;
  return sum;
}

std::int64_t bytes_of(const std::vector<TrafficTerm>& terms, std::string_view axis) {
  std::int64_t sum = 0;
  for (const TrafficTerm& term : terms) sum += axis.empty() || term.axis == axis ? term.bytes : 0;
  return sum;
}

DryRun dry_run(const DryRank::MakeModel& make, const EngineOptions& options, const MeshShape& mesh, int rank,
               const MicroBatchSize& micro_batch, std::int64_t micro_batches) {
  DryRank dry(make, options, mesh, rank, micro_batch);
  const detail::Columns columns(options.layout.schedule, mesh.pp, options.layout.chunks, micro_batches);
  DryRun run{.parameters = dry.parameters(),
             .pieces = dry.pieces(traits_of(options.layout.schedule).splits_backward),
             .elsewhere = dry.elsewhere()};
  const ColumnRecord column =
      columns.run(coordinates_of(mesh, rank).pp, run.pieces, dry.batch_bytes(),
                  [&](const std::vector<Action>& actions) { return dry.walk(actions); });
  run.most_in_flight = column.most_in_flight;
  const std::vector<MemoryTerm> persistent = dry.persistent();
  const WorkRecord once = dry.once();
  run.memory = detail::memory_of(persistent, column, once.peak);
  run.traffic = detail::traffic_of(run.pieces, micro_batches, column);
  for (const TrafficTerm& term : once.sent) detail::add_traffic(run.traffic, term);
  if (mesh.world() > 1)
    detail::add_traffic(run.traffic, {"world", "agreement on the batch", dry.agreement_bytes()});
  detail::take_crossed(run.traffic, run.elsewhere);
  run.elsewhere.host_bytes += dry.host_bytes_of_pass() * column.most_in_flight;
  return run;
}

}  // namespace tessera
