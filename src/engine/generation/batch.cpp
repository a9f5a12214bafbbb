#include "engine/generation/batch.hpp"

#include <algorithm>

#include "tessera/comm/heartbeat.hpp"
#include "tessera/engine/engine.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera::generation {
namespace {

/// Decoding passes of a lane that a pipeline runs before texts that are done leave. So long it does not run
/// empty; a text that ends computes at most so many positions for nothing.
constexpr std::int64_t kStepsPerRun = 8;

/// The failure of a rank that does not know why.
constexpr const char* kElsewhere = "?";

/// Of logits [n, columns] or [1, n, columns].
Tensor rows_of(const Tensor& logits, std::int64_t first, std::int64_t count) {
  return logits.narrow(logits.rank() - 2, first, count);
}

}  // namespace

Seat Seat::of(Engine& engine) {
  TESSERA_ENSURE(
      ConfigError, engine.mesh().shape().cp == 1,
      "texts are not written by context ranks: use parallel.context 1 (context_parallel_size) for them");
  TESSERA_ENSURE(
      ConfigError, engine.mesh().shape().ep == 1,
      "texts are not written by expert ranks: use parallel.expert 1 (expert_model_parallel_size) for them");
  return {.ctx = engine.ctx(),
          .model = engine.model(),
          .self = nullptr,
          .mesh = engine.mesh(),
          .schedule = engine.options().layout.schedule,
          .chunks = engine.options().layout.chunks,
          .graphs = engine.options().cuda_graph,
          .hold_weights = [&engine]() -> std::shared_ptr<void> {
            engine.params().weights().wait();
            return std::make_shared<WeightWalk::Hold>(engine.params().walk());
          }};
}

DecodeBatch::DecodeBatch(const Seat& seat, const BatchOptions& options)
    : ctx_(seat.ctx),
      host_(seat.host),
      model_(seat.model),
      mesh_(seat.mesh),
      peers_(seat.peers()),
      schedule_(seat.schedule),
      chunks_(seat.chunks),
      speaker_(seat.speaker()),
      options_(options),
      drawer_(ctx_, &mesh_[Axis::tp], model_.vocab_size()),
      executor_(ctx_, mesh_[Axis::pp]) {
  const auto stages = static_cast<std::int64_t>(mesh_.shape().pp);
  for (std::int64_t i = 0; i < stages; ++i)
    lanes_.emplace_back(ctx_, model_, options_.width, (options_.texts + stages - 1) / stages);
  if (ctx_.device().is_cuda() && stages == 1 && chunks_ == 1 && mesh_.shape().tp == 1 && options_.width == 1)
    decoder_ = std::make_unique<DeviceDecoder>(ctx_, model_, seat.graphs);
}

std::int64_t DecodeBatch::units() const {
  std::int64_t all = 0;
  for (const Lane& lane : lanes_) all += lane.units();
  return all;
}

void DecodeBatch::each(const std::function<void(Unit&)>& look) const {
  for (const Lane& lane : lanes_) lane.each(look);
}

void DecodeBatch::drop_done() {
  for (Lane& lane : lanes_) lane.leave();
}

void DecodeBatch::round(std::deque<std::unique_ptr<Unit>>& waiting, const std::function<void(Unit&)>& done) {
  if (admit(waiting)) run_passes(prefill_passes());
  if (!failure_.empty()) return;
  for (Lane& lane : lanes_) lane.spread();
  collect(done);
  if (units() == 0) return;
  decode();
  collect(done);
  heartbeat(mesh_.world());
}

std::vector<Tensor> DecodeBatch::forward(int chunk, int micro_batch, std::vector<Tensor> inputs) {
  if (chunk == 0) begin(micro_batch);
  const bool last = model_.is_last(chunk);
  Step& step = step_of(micro_batch);
  if (step.pass.batch == 0)
    return last ? std::vector<Tensor>() : empty_tensors(ctx_, outputs(chunk, micro_batch));
  const Forward forward{.exec = ctx_, .input = step.input, .cache = &step.place};
  std::vector<Var> values;
  for (Tensor& input : inputs) values.emplace_back(std::move(input));
  values = model_.run_piece(forward, chunk, values, Model::Output::own_logits, Tensor());
  if (last && !step.pass.scored.empty()) score(step, values.at(0).value());
  if (last && !step.pass.drawn.empty()) draw(micro_batch, values.at(0).value());
  if (chunk + 1 == chunks_) listen(step);
  std::vector<Tensor> results;
  if (last) return results;
  for (Var& value : values) results.push_back(value.take());
  return results;
}

std::vector<Port> DecodeBatch::inputs(int chunk, int micro_batch) const {
  return model_.inputs(chunk, size_of(micro_batch));
}

std::vector<Port> DecodeBatch::outputs(int chunk, int micro_batch) const {
  return model_.outputs(chunk, size_of(micro_batch));
}

bool DecodeBatch::admit(std::deque<std::unique_ptr<Unit>>& waiting) {
  std::vector<std::vector<std::unique_ptr<Unit>>> fresh(lane_count());
  bool any = false;
  for (bool found = true; found && !waiting.empty();) {
    found = false;
    for (std::size_t i = 0; i < lane_count() && !waiting.empty(); ++i) {
      if (lanes_[i].free() <= static_cast<std::int64_t>(fresh[i].size())) continue;
      fresh[i].push_back(std::move(waiting.front()));
      waiting.pop_front();
      found = any = true;
    }
  }
  for (std::size_t i = 0; i < lane_count(); ++i) {
    lanes_[i].enter(std::move(fresh[i]));
    lanes_[i].reserve(kStepsPerRun);
  }
  return any;
}

std::vector<Pass> DecodeBatch::prefill_passes() {
  std::vector<std::vector<Pass>> by_lane;
  std::size_t most = 0;
  for (const Lane& lane : lanes_) {
    by_lane.push_back(lane.prefill(options_.prefill_chunk));
    most = std::max(most, by_lane.back().size());
  }
  std::vector<Pass> passes;
  for (std::size_t i = 0; i < most; ++i) {
    for (auto& lane : by_lane) passes.push_back(i < lane.size() ? std::move(lane[i]) : Pass());
  }
  return passes;
}

void DecodeBatch::decode() {
  if (decoder_ && decoder_->serves(lanes_[0])) return decode_on_device();
  // Where the pieces of a stage are far apart in its order, a lane's next pass may stand before its last
  // one.
  const bool apart = mesh_.shape().pp > 1 && traits_of(schedule_).folded;
  const std::int64_t steps = mesh_.shape().pp > 1 && !apart ? kStepsPerRun : 1;
  for (Lane& lane : lanes_) lane.reserve(steps);
  std::vector<Pass> passes;
  for (std::int64_t i = 0; i < steps; ++i) {
    for (const Lane& lane : lanes_) passes.push_back(lane.decode());
  }
  run_passes(std::move(passes));
}

void DecodeBatch::decode_on_device() {
  Lane& lane = lanes_[0];
  lane.reserve(DeviceDecoder::kRoom);
  steps_.clear();
  steps_.push_back({lane.decode(), {}, {}, {}, {}, false, false});
  std::vector<Choice> choices;
  unless_failed([&] {
    const std::vector<DrawnToken> drawn = decoder_->next(lane);
    auto token = drawn.begin();
    for (Unit* unit : steps_[0].pass.drawn) {
      choices.push_back(take_token(*unit, token->token, token->logprob));
      ++token;
    }
  });
  tell(0, choices);
  settle(0);
}

void DecodeBatch::run_passes(std::vector<Pass> passes) {
  steps_.clear();
  sizes_.clear();
  for (Pass& pass : passes) {
    sizes_.push_back(pass.size());
    steps_.push_back({std::move(pass), {}, {}, {}, {}, false, false});
  }
  const auto count = static_cast<int>(steps_.size());
  if (mesh_.shape().pp == 1 && chunks_ == 1) {
    for (int i = 0; i < count; ++i) forward(0, i, {});
  } else {
    executor_.run(make_schedule(schedule_, mesh_.shape().pp, chunks_, count, true), *this);
  }
  for (int i = 0; i < count; ++i) settle(i);
}

void DecodeBatch::begin(int micro_batch) {
  const auto before = micro_batch - static_cast<int>(lane_count());
  if (before >= 0) settle(before);
  Step& step = step_of(micro_batch);
  if (step.pass.batch == 0) return;
  step.input = lane_of(micro_batch).input(step.pass);
  step.place = lane_of(micro_batch).place(step.pass);
}

std::int64_t DecodeBatch::words(const Step& step) const {
  return 1 + static_cast<std::int64_t>(step.pass.drawn.size()) * (1 + 2 * options_.width);
}

void DecodeBatch::unless_failed(const std::function<void()>& work) {
  if (!failure_.empty()) return;
  try {
    work();
  } catch (const Error& error) {
    failure_ = error.what();
  } catch (const std::exception& error) {
    failure_ = detail::concat("generation was stopped: ", error.what());
  }
}

void DecodeBatch::score(const Step& step, const Tensor& logits) {
  unless_failed([&] {
    const auto count = static_cast<std::int64_t>(step.pass.scored.size());
    drawer_.score(rows_of(wanted(step, logits), 0, count), step.pass.scored);
  });
}

void DecodeBatch::draw(int micro_batch, const Tensor& logits) {
  Step& step = step_of(micro_batch);
  std::vector<Choice> choices;
  unless_failed([&] {
    const auto scored = static_cast<std::int64_t>(step.pass.scored.size());
    Tensor own = wanted(step, logits);
    if (scored > 0) own = rows_of(own, scored, own.numel() / own.size(-1) - scored);
    choices = drawer_.draw(own, step.pass.drawn, options_.width);
  });
  if (speaks()) tell(micro_batch, choices);
}

void DecodeBatch::tell(int micro_batch, const std::vector<Choice>& choices) {
  Step& step = step_of(micro_batch);
  std::vector<std::int32_t> message(static_cast<std::size_t>(words(step)), 0);
  message[0] = failure_.empty() ? 0 : 1;
  auto* to = message.data() + 1;
  for (const Choice& choice : choices) {
    *to++ = choice.done ? 1 : 0;
    to = std::ranges::copy(choice.tokens, to).out;
    to = std::ranges::copy(choice.parents, to).out;
  }
  step.message = Tensor::from(host_, message, {words(step)});
  step.sent = peers_.broadcast(host_, step.message, speaker_);
  step.drawn = true;
  take(micro_batch);
}

Tensor DecodeBatch::wanted(const Step& step, const Tensor& logits) const {
  const std::int64_t columns = logits.size(-1), rows = logits.numel() / columns;
  const std::vector<std::int32_t> asked = step.pass.asked();
  const bool all_rows = !step.pass.prefill || rows != static_cast<std::int64_t>(asked.size());
  TESSERA_CHECK(!all_rows || rows == step.pass.batch * step.pass.seq, "a model returned logits of ", rows,
                " rows, for ", step.pass.batch, " texts of ", step.pass.seq, " positions");
  if (!step.pass.prefill || (!all_rows && asked == step.pass.last)) return logits;
  const std::vector<float> all =
      (logits.is_contiguous() ? logits : ops::contiguous(ctx_, logits)).to_floats();
  std::vector<float> picked;
  picked.reserve(step.pass.last.size() * static_cast<std::size_t>(columns));
  for (const std::int32_t row : step.pass.last) {
    const std::int64_t at = all_rows ? row : std::ranges::lower_bound(asked, row) - asked.begin();
    const auto from = all.begin() + at * columns;
    picked.insert(picked.end(), from, from + columns);
  }
  const auto n = static_cast<std::int64_t>(step.pass.last.size());
  return Tensor::from(host_, picked, {n, columns});
}

void DecodeBatch::listen(Step& step) {
  if (step.pass.drawn.empty() || step.drawn) return;
  step.message = Tensor::empty(host_, {words(step)}, DType::i32);
  step.sent = peers_.broadcast(host_, step.message, speaker_);
}

void DecodeBatch::settle(int micro_batch) {
  Step& step = step_of(micro_batch);
  if (step.settled) return;
  step.settled = true;
  if (step.pass.drawn.empty()) return;
  step.sent.wait(host_);
  if (!step.drawn) take(micro_batch);
}

void DecodeBatch::take(int micro_batch) {
  Step& step = step_of(micro_batch);
  Lane& lane = lane_of(micro_batch);
  lane.computed(step.pass);
  const auto* word = step.message.data<std::int32_t>();
  if (*word++ != 0) {
    if (failure_.empty()) failure_ = kElsewhere;
    return;
  }
  const auto width = static_cast<std::size_t>(options_.width);
  for (Unit* unit : step.pass.drawn) {
    Choice choice{*word++ != 0, {}, {}};
    choice.tokens.assign(word, word + width);
    choice.parents.assign(word + width, word + 2 * width);
    word += 2 * width;
    if (unit->options->on_token && !unit->done && unit->most_new > 0)
      unit->options->on_token(unit->prompt, unit->sample, choice.tokens[0]);
    lane.apply(*unit, choice);
  }
}

void DecodeBatch::collect(const std::function<void(Unit&)>& done) {
  for (Lane& lane : lanes_) {
    for (const auto& unit : lane.leave()) done(*unit);
  }
}

}  // namespace tessera::generation
