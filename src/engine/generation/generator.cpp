#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "engine/generation/batch.hpp"
#include "engine/generation/beams.hpp"
#include "engine/generation/prompts.hpp"
#include "engine/generation/results.hpp"
#include "tessera/base/hash.hpp"
#include "tessera/comm/meeting.hpp"

namespace tessera {

using namespace generation;

namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

/// One rank's part, between the calls.
struct Generator::State {
  Seat seat;
  StreamGraph::Stats graph = {};
};

namespace {

std::uint64_t hash_of(const std::vector<Prompt>& prompts, const GenerationOptions& o) {
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
                                o.top_logprobs,
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
void agree(Communicator& world, const Model& model, const std::vector<Prompt>& prompts,
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
  if (unit.most_new == 0) unit.text[0].clear(), unit.logprobs[0].clear(), unit.likeliest.clear();
  GeneratedText text{.tokens = std::move(unit.text[0]),
                     .logprobs = std::move(unit.prompt_logprobs),
                     .top_logprobs = std::move(unit.prompt_likeliest),
                     .stopped = unit.stopped && unit.most_new > 0};
  text.logprobs.insert(text.logprobs.end(), unit.logprobs[0].begin(), unit.logprobs[0].end());
  std::ranges::move(unit.likeliest, std::back_inserter(text.top_logprobs));
  return text;
}

}  // namespace

Generator::Generator(Engine& engine) : state_(new State{Seat::of(engine)}) { state_->seat.peers(); }

Generator::Generator(const ExecCtx& ctx, Model& model) {
  const auto self = ProcessMesh::self();
  state_.reset(new State{{.ctx = ctx, .model = model, .self = self, .mesh = *self}});
}

Generator::~Generator() = default;
Generator::Generator(Generator&&) noexcept = default;

const StreamGraph::Stats& Generator::graph() const { return state_->graph; }

std::vector<Generated> Generator::run(const std::vector<std::vector<std::int32_t>>& prompts,
                                      const GenerationOptions& options) {
  Seat& seat = state_->seat;
  Communicator& world = seat.mesh.world();
  agree(world, seat.model, prompts, options);
  const std::shared_ptr<void> weights = seat.hold_weights ? seat.hold_weights() : nullptr;
  std::int64_t longest = 0;
  for (const Prompt& prompt : prompts) longest = std::max(longest, longest_of(seat.model, prompt, options));
  if (longest > 0) seat.model.reserve_positions(seat.ctx, longest);

  const Part own =
      part_of(static_cast<std::int64_t>(prompts.size()), seat.mesh.coordinates().dp, seat.mesh.shape().dp);
  std::vector<Generated> results(static_cast<std::size_t>(own.count));
  const Prompt start = {options.decoder_start};
  std::deque<std::unique_ptr<Unit>> waiting;
  for (std::int64_t i = own.begin; i < own.begin + own.count; ++i) {
    const Prompt& prompt = prompts[static_cast<std::size_t>(i)];
    const std::int64_t most_new = most_new_tokens(seat.model, prompt, options);
    if (options.num_beams == 1 || most_new == 0)
      results[static_cast<std::size_t>(i - own.begin)].resize(
          static_cast<std::size_t>(options.num_beams == 1 ? options.num_samples : options.num_return));
    if (most_new > 0 || options.prompt_logprobs)
      add_units(waiting, options, i,
                options.first_sample + static_cast<std::uint64_t>(i * options.num_samples), prompt,
                seat.model.reads_encoder_tokens() ? &start : nullptr, most_new);
  }
  const auto take = [&](Unit& unit) {
    Generated& texts = results[static_cast<std::size_t>(unit.prompt - own.begin)];
    if (options.num_beams > 1) {
      texts = best_of(unit, options);
    } else {
      texts[static_cast<std::size_t>(unit.sample)] = text_of(unit);
    }
  };
  const auto all = static_cast<std::int64_t>(waiting.size());
  DecodeBatch batch(seat, {.width = options.num_beams,
                           .texts = options.batch_size > 0 ? std::min(options.batch_size, all) : all,
                           .prefill_chunk = options.prefill_chunk});
  while (batch.failure().empty() && (batch.units() > 0 || !waiting.empty())) batch.round(waiting, take);
  state_->graph = batch.graph();
  if (world.size() == 1) {
    TESSERA_CHECK(batch.failure().empty(), batch.failure());
    return results;
  }
  return share_results(world, seat.mesh.shape(), seat.speaks(), batch.failure(), results);
}

}  // namespace tessera
