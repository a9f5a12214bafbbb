#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "engine/generation/beams.hpp"
#include "engine/generation/drawer.hpp"
#include "engine/generation/lane.hpp"
#include "engine/generation/results.hpp"
#include "tessera/base/hash.hpp"
#include "tessera/base/schedules.hpp"
#include "tessera/comm/bytes.hpp"
#include "tessera/comm/heartbeat.hpp"
#include "tessera/comm/meeting.hpp"
#include "tessera/engine/engine.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera {

using namespace generation;

namespace {

/// Decoding passes of a lane that a pipeline runs before texts that are done leave. So long it does not run
/// empty; a text that ends computes at most so many positions for nothing.
constexpr std::int64_t kStepsPerRun = 8;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

/// One rank's part, between the calls.
struct Generator::State {
  ExecCtx ctx;
  Model& model;
  std::shared_ptr<ProcessMesh> self;  ///< where there is no engine
  ProcessMesh& mesh;
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  int chunks = 1;
  /// All weights are here until the result goes: those that an update still sends, those that are shared out.
  std::function<std::shared_ptr<void>()> hold_weights = {};
  ExecCtx host = ExecCtx::cpu(1);

  Communicator& peers() { return mesh.group({Axis::tp, Axis::pp}); }
  bool folded() const { return traits_of(schedule).folded; }
  bool has_head() const { return model.is_last(model.num_pieces() - 1); }
  /// Where tokens are drawn: the first tensor rank of the stage with the head, as a rank of peers().
  int speaker() const { return (folded() ? 0 : mesh.shape().pp - 1) * mesh.shape().tp; }
  bool speaks() { return peers().rank() == speaker(); }
};

namespace {

/// One call, on one rank.
class Call final : public StageProgram {
 public:
  template <typename State>
  Call(State& state, const GenerationOptions& options)
      : ctx_(state.ctx),
        host_(state.host),
        model_(state.model),
        mesh_(state.mesh),
        peers_(state.peers()),
        schedule_(state.schedule),
        chunks_(state.chunks),
        speaker_(state.speaker()),
        options_(options),
        drawer_(ctx_, &mesh_[Axis::tp], model_.vocab_size()),
        executor_(ctx_, mesh_[Axis::pp]) {}

  /// Computes all units. Returns why it could not, the same on all ranks that compute them; empty if it
  /// could.
  std::string run(std::deque<std::unique_ptr<Unit>> waiting, const std::function<void(Unit&)>& done) {
    make_lanes(static_cast<std::int64_t>(waiting.size()));
    while (failure_.empty()) {
      if (admit(waiting)) run_passes(prefill_passes());
      if (!failure_.empty()) break;
      for (Lane& lane : lanes_) lane.spread();
      collect(done);
      if (std::ranges::all_of(lanes_, [](const Lane& lane) { return lane.units() == 0; })) {
        if (waiting.empty()) break;
        continue;
      }
      decode();
      collect(done);
      heartbeat(mesh_.world());
    }
    return failure_;
  }

  std::vector<Tensor> forward(int chunk, int micro_batch, std::vector<Tensor> inputs) override {
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
  std::vector<Tensor> backward(int, int, std::vector<Tensor>, bool) override { return {}; }
  void weight_gradient(int, int) override {}
  std::vector<Port> inputs(int chunk, int micro_batch) const override {
    return model_.inputs(chunk, size_of(micro_batch));
  }
  std::vector<Port> outputs(int chunk, int micro_batch) const override {
    return model_.outputs(chunk, size_of(micro_batch));
  }

 private:
  /// A pass between its begin and the choice that follows from it.
  struct Step {
    Pass pass;
    MicroBatch input;
    CachePass place;
    Tensor message;  ///< what the speaker tells
    Pending sent;
    bool drawn = false, settled = false;
  };

  bool speaks() const { return peers_.rank() == speaker_; }
  std::size_t lane_count() const { return lanes_.size(); }
  Lane& lane_of(int micro_batch) { return lanes_[static_cast<std::size_t>(micro_batch) % lane_count()]; }
  Step& step_of(int micro_batch) { return steps_.at(static_cast<std::size_t>(micro_batch)); }
  MicroBatchSize size_of(int micro_batch) const {
    // Decoding changes no sizes between two runs.
    return sizes_.at(static_cast<std::size_t>(micro_batch));
  }

  void make_lanes(std::int64_t units) {
    const auto stages = static_cast<std::int64_t>(mesh_.shape().pp);
    const std::int64_t at_once = options_.batch_size > 0 ? std::min(options_.batch_size, units) : units;
    for (std::int64_t i = 0; i < stages; ++i)
      lanes_.emplace_back(ctx_, model_, options_.num_beams, ceil_div(at_once, stages),
                          options_.prompt_logprobs);
  }

  /// Fills free places, the lanes alike. Returns whether there are new ones.
  bool admit(std::deque<std::unique_ptr<Unit>>& waiting) {
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

  /// By micro-batch; lanes with fewer chunks have empty ones.
  std::vector<Pass> prefill_passes() {
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

  void decode() {
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

  void run_passes(std::vector<Pass> passes) {
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

  /// The first of this rank's pieces is about to compute the pass.
  void begin(int micro_batch) {
    const auto before = micro_batch - static_cast<int>(lane_count());
    if (before >= 0) settle(before);
    Step& step = step_of(micro_batch);
    if (step.pass.batch == 0) return;
    step.input = lane_of(micro_batch).input(step.pass);
    step.place = lane_of(micro_batch).place(step.pass);
  }

  /// Words of a message: whether drawing failed, then of each unit whether it is done, tokens and parents.
  std::int64_t words(const Step& step) const {
    return 1 + static_cast<std::int64_t>(step.pass.drawn.size()) * (1 + 2 * options_.num_beams);
  }

  /// Ranks that heard of a failure have another one's to tell, or none: those with the head go on alike.
  template <typename Work>
  void unless_failed(Work work) {
    if (!failure_.empty()) return;
    try {
      work();
    } catch (const Error& error) {
      failure_ = error.what();
    } catch (const std::exception& error) {
      failure_ = detail::concat("generation was stopped: ", error.what());
    }
  }

  void score(const Step& step, const Tensor& logits) {
    unless_failed([&] {
      const auto count = static_cast<std::int64_t>(step.pass.scored.size());
      drawer_.score(rows_of(wanted(step, logits), 0, count), step.pass.scored);
    });
  }

  void draw(int micro_batch, const Tensor& logits) {
    Step& step = step_of(micro_batch);
    std::vector<Choice> choices;
    unless_failed([&] {
      const auto scored = static_cast<std::int64_t>(step.pass.scored.size());
      Tensor own = wanted(step, logits);
      if (scored > 0) own = rows_of(own, scored, own.numel() / own.size(-1) - scored);
      choices = drawer_.draw(own, step.pass.drawn, options_.num_beams, options_);
    });
    if (!speaks()) return;
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

  /// Of logits [n, columns] or [1, n, columns].
  static Tensor rows_of(const Tensor& logits, std::int64_t first, std::int64_t count) {
    return logits.narrow(logits.rank() - 2, first, count);
  }

  /// The rows of logits that were asked for; models that know nothing of `last` give those of all positions.
  Tensor wanted(const Step& step, const Tensor& logits) const {
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

  /// A rank that is done with a pass begins to receive what becomes of it: before it computes another one, as
  /// others may wait for this one's part in the message before they give it that one's input.
  void listen(Step& step) {
    if (step.pass.drawn.empty() || step.drawn) return;
    step.message = Tensor::empty(host_, {words(step)}, DType::i32);
    step.sent = peers_.broadcast(host_, step.message, speaker_);
  }

  /// Waits for what became of a pass, once.
  void settle(int micro_batch) {
    Step& step = step_of(micro_batch);
    if (step.settled) return;
    step.settled = true;
    if (step.pass.drawn.empty()) return;
    step.sent.wait(host_);
    if (!step.drawn) take(micro_batch);
  }

  /// What the speaker said of a pass becomes the state of its texts.
  void take(int micro_batch) {
    Step& step = step_of(micro_batch);
    Lane& lane = lane_of(micro_batch);
    lane.computed(step.pass);
    const auto* word = step.message.data<std::int32_t>();
    if (*word++ != 0) {
      if (failure_.empty()) failure_ = kElsewhere;
      return;
    }
    const auto width = static_cast<std::size_t>(options_.num_beams);
    for (Unit* unit : step.pass.drawn) {
      Choice choice{*word++ != 0, {}, {}};
      choice.tokens.assign(word, word + width);
      choice.parents.assign(word + width, word + 2 * width);
      word += 2 * width;
      if (options_.on_token && !unit->done && unit->most_new > 0)
        options_.on_token(unit->prompt, unit->sample, choice.tokens[0]);
      lane.apply(*unit, choice);
    }
  }

  void collect(const std::function<void(Unit&)>& done) {
    for (Lane& lane : lanes_) {
      for (const auto& unit : lane.leave()) done(*unit);
    }
  }

 public:
  static constexpr const char* kElsewhere = "?";  ///< the speaker knows why

 private:
  ExecCtx ctx_, host_;
  Model& model_;
  ProcessMesh& mesh_;
  Communicator& peers_;
  PipelineSchedule schedule_;
  int chunks_, speaker_;
  const GenerationOptions& options_;
  Drawer drawer_;
  PipelineExecutor executor_;
  std::deque<Lane> lanes_;
  std::vector<Step> steps_;
  std::vector<MicroBatchSize> sizes_;
  std::string failure_;
};

/// Tokens that a text begins with.
std::int64_t first_tokens(const Model& model, const std::vector<std::int32_t>& prompt) {
  return model.reads_encoder_tokens() ? 1 : static_cast<std::int64_t>(prompt.size());
}

/// Positions of a text at most. Models with an encoder were made for no particular length.
std::int64_t most_positions(const Model& model) {
  return model.reads_encoder_tokens() ? model.position_limit() : model.max_positions();
}

std::int64_t longest_text(const Model& model, const std::vector<std::int32_t>& prompt,
                          const GenerationOptions& options) {
  const std::int64_t first = first_tokens(model, prompt), limit = most_positions(model);
  const std::int64_t most = options.max_length > 0 ? std::min(limit, options.max_length) : limit;
  return first + std::clamp<std::int64_t>(most - first, 0, options.max_new_tokens);
}

void check_prompts(const Model& model, const std::vector<std::vector<std::int32_t>>& prompts,
                   const GenerationOptions& options) {
  check(options);
  model.check_generates(0);
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const auto length = static_cast<std::int64_t>(prompts[i].size());
    TESSERA_CHECK(length > 0, "generation needs at least one token to begin with: prompt ", i, " has none");
    TESSERA_CHECK(length <= most_positions(model), "prompt ", i, " of ", length,
                  " tokens is longer than the model's ", most_positions(model), " positions");
    for (const std::int32_t token : prompts[i]) {
      TESSERA_CHECK(token >= 0 && token < model.vocab_size(), "token ", token, " of prompt ", i,
                    " is outside the vocabulary of ", model.vocab_size());
    }
    model.check_generates(longest_text(model, prompts[i], options));
  }
  TESSERA_CHECK(!options.prompt_logprobs || !model.reads_encoder_tokens(),
                "prompt_logprobs are of decoders: an encoder gives the tokens it reads none");
  TESSERA_CHECK(options.decoder_start >= 0 && options.decoder_start < model.vocab_size(), "decoder_start ",
                options.decoder_start, " is outside the vocabulary of ", model.vocab_size());
  for (const std::int32_t token : options.stop_tokens) {
    TESSERA_CHECK(token >= 0 && token < model.vocab_size(), "stop token ", token,
                  " is outside the vocabulary of ", model.vocab_size());
  }
}

std::uint64_t hash_of(const std::vector<std::vector<std::int32_t>>& prompts, const GenerationOptions& o) {
  ContentHash hash;
  const auto add = [&](const auto& values) {
    // Pieces are multiples of 32 bytes but for the last one.
    std::vector<std::byte> bytes(ceil_div(static_cast<std::int64_t>(std::span(values).size_bytes()), 32) *
                                 32);
    std::memcpy(bytes.data(), std::span(values).data(), std::span(values).size_bytes());
    hash.add(bytes);
  };
  const auto bits = [](double value) { return std::bit_cast<std::int64_t>(value); };
  add(std::vector<std::int64_t>{static_cast<std::int64_t>(prompts.size()),
                                o.max_new_tokens,
                                o.max_length,
                                o.min_new_tokens,
                                bits(o.temperature),
                                o.top_k,
                                bits(o.top_p),
                                bits(o.top_p_decay),
                                bits(o.top_p_bound),
                                bits(o.repetition_penalty),
                                static_cast<std::int64_t>(o.seed),
                                static_cast<std::int64_t>(o.first_sample),
                                o.num_samples,
                                o.num_beams,
                                o.num_return,
                                bits(o.length_penalty),
                                static_cast<std::int64_t>(o.early_stopping),
                                static_cast<std::int64_t>(o.beam_rule),
                                o.batch_size,
                                o.prefill_chunk,
                                o.logprobs ? 1 : 0,
                                o.prompt_logprobs ? 1 : 0,
                                o.decoder_start,
                                static_cast<std::int64_t>(o.stop_tokens.size())});
  if (!o.stop_tokens.empty()) add(o.stop_tokens);
  for (const auto& prompt : prompts) {
    add(std::vector<std::int64_t>{static_cast<std::int64_t>(prompt.size())});
    if (!prompt.empty()) add(prompt);
  }
  return hash.value();
}

/// Ranks must have come with the same prompts and options, and with none that cannot be. Collective.
void agree(Communicator& world, const Model& model, const std::vector<std::vector<std::int32_t>>& prompts,
           const GenerationOptions& options) {
  std::exception_ptr failure;
  try {
    check_prompts(model, prompts, options);
  } catch (const Error&) {
    if (world.size() == 1) throw;
    failure = std::current_exception();
  }
  const auto told =
      meet(world, "generate()", {static_cast<std::int64_t>(hash_of(prompts, options)), failure ? 1 : 0});
  std::vector<int> others;
  for (std::size_t r = 0; r < told.size(); ++r) {
    if (told[r][0] != told[0][0]) others.push_back(static_cast<int>(r));
  }
  TESSERA_CHECK(others.empty(), "generate() got other prompts or options on ", ranks_text(others),
                " than on rank 0: every rank gives the same ones");
  if (failure) std::rethrow_exception(failure);
}

GeneratedText text_of(Unit& unit) {
  // Of a text that gets no tokens one was drawn all the same.
  if (unit.most_new == 0) unit.text[0].clear(), unit.logprobs[0].clear();
  std::vector<float> logprobs = std::move(unit.prompt_logprobs);
  logprobs.insert(logprobs.end(), unit.logprobs[0].begin(), unit.logprobs[0].end());
  return {std::move(unit.text[0]), std::move(logprobs), 0, unit.stopped && unit.most_new > 0};
}

/// The texts of prompt number `index`; `start`: what they begin with where an encoder reads the prompt, or
/// null.
void add_units(std::deque<std::unique_ptr<Unit>>& waiting, const GenerationOptions& options,
               std::int64_t index, const std::vector<std::int32_t>& prompt,
               const std::vector<std::int32_t>* start, std::int64_t most_new) {
  for (std::int64_t s = 0; s < options.num_samples; ++s) {
    auto unit = std::make_unique<Unit>();
    unit->prompt = index;
    unit->sample = s;
    unit->number = options.first_sample + static_cast<std::uint64_t>(index * options.num_samples + s);
    unit->tokens = start != nullptr ? start : &prompt;
    unit->encoded = start != nullptr ? &prompt : nullptr;
    unit->most_new = most_new;
    unit->text.resize(1);
    unit->logprobs.resize(1);
    waiting.push_back(std::move(unit));
  }
}

}  // namespace

Generator::Generator(Engine& engine)
    : state_(new State{.ctx = engine.ctx(),
                       .model = engine.model(),
                       .self = nullptr,
                       .mesh = engine.mesh(),
                       .schedule = engine.options().layout.schedule,
                       .chunks = engine.options().layout.chunks,
                       .hold_weights = [&engine]() -> std::shared_ptr<void> {
                         engine.params().weights().wait();
                         return std::make_shared<WeightWalk::Hold>(engine.params().walk());
                       }}) {
  TESSERA_CHECK(state_->mesh.shape().cp == 1, "text is generated without context parallelism");
  state_->peers();
}

Generator::Generator(const ExecCtx& ctx, Model& model) {
  const auto self = ProcessMesh::self();
  state_.reset(new State{.ctx = ctx, .model = model, .self = self, .mesh = *self});
}

Generator::~Generator() = default;
Generator::Generator(Generator&&) noexcept = default;

std::vector<Generated> Generator::run(const std::vector<std::vector<std::int32_t>>& prompts,
                                      const GenerationOptions& options) {
  State& state = *state_;
  Communicator& world = state.mesh.world();
  agree(world, state.model, prompts, options);
  const std::shared_ptr<void> weights = state.hold_weights ? state.hold_weights() : nullptr;
  std::int64_t longest = 0;
  for (const auto& prompt : prompts) {
    longest = std::max(
        {longest, longest_text(state.model, prompt, options), static_cast<std::int64_t>(prompt.size())});
  }
  if (longest > 0) state.model.reserve_positions(state.ctx, longest);

  const Part own =
      part_of(static_cast<std::int64_t>(prompts.size()), state.mesh.coordinates().dp, state.mesh.shape().dp);
  std::vector<Generated> results(static_cast<std::size_t>(own.count));
  const std::vector<std::int32_t> start = {options.decoder_start};
  std::deque<std::unique_ptr<Unit>> waiting;
  for (std::int64_t i = own.begin; i < own.begin + own.count; ++i) {
    const auto& prompt = prompts[static_cast<std::size_t>(i)];
    const std::int64_t most_new =
        longest_text(state.model, prompt, options) - first_tokens(state.model, prompt);
    if (options.num_beams == 1 || most_new == 0)
      results[static_cast<std::size_t>(i - own.begin)].resize(
          static_cast<std::size_t>(options.num_beams == 1 ? options.num_samples : options.num_return));
    if (most_new > 0 || options.prompt_logprobs)
      add_units(waiting, options, i, prompt, state.model.reads_encoder_tokens() ? &start : nullptr, most_new);
  }
  const auto take = [&](Unit& unit) {
    Generated& texts = results[static_cast<std::size_t>(unit.prompt - own.begin)];
    if (options.num_beams > 1) {
      texts = best_of(unit, options);
    } else {
      texts[static_cast<std::size_t>(unit.sample)] = text_of(unit);
    }
  };
  const std::string failure = Call(state, options).run(std::move(waiting), take);
  if (world.size() == 1) {
    TESSERA_CHECK(failure.empty(), failure);
    return results;
  }
  return share_results(world, state.mesh.shape(), state.speaks(), failure, results);
}

}  // namespace tessera
