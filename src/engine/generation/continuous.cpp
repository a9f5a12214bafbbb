#include "tessera/engine/continuous.hpp"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "engine/generation/batch.hpp"
#include "engine/generation/beams.hpp"
#include "engine/generation/orders.hpp"
#include "engine/generation/prompts.hpp"
#include "tessera/comm/bytes.hpp"

namespace tessera {

using namespace generation;

namespace {

/// A request that this data rank computes.
struct Live {
  TextRequest request;
  Prompt start;  ///< what its texts begin with where an encoder reads the prompt
  std::map<std::int64_t, std::size_t> told = {};  ///< by sample: new tokens of which there were news
  std::int64_t finished = 0;                      ///< units that ended
};

/// Texts of one width.
struct Group {
  std::unique_ptr<DecodeBatch> batch;
  std::deque<std::unique_ptr<Unit>> waiting = {};
};

/// Texts that a request asks for.
std::int64_t texts_of(const GenerationOptions& o) { return o.num_beams > 1 ? o.num_return : o.num_samples; }

TextNews failed(std::uint64_t id, const std::string& why) {
  return {.id = id, .sample = 0, .text = {}, .prompt_logprobs = 0, .done = true, .failure = why};
}

}  // namespace

struct ContinuousGenerator::State {
  Seat seat;
  ContinuousOptions options;
  std::shared_ptr<void> weights = {};
  std::map<std::uint64_t, Live> live = {};           ///< of this data rank
  std::map<std::int64_t, Group> groups = {};         ///< by width
  std::vector<TextNews> news = {};                   ///< the speaker's, until the next round
  std::map<std::uint64_t, std::int64_t> asked = {};  ///< on rank 0: texts that are not done, by request
  std::map<std::uint64_t, int> placed = {};          ///< on rank 0: the data rank of each
  std::vector<std::uint64_t> ended = {};             ///< requests of units that ended in this round
  bool speaks = false;

  Communicator& world() const { return seat.mesh.world(); }

  PlacedOrders place(const Orders& orders) {
    PlacedOrders result{{}, orders.cancelled, orders.end};
    for (const std::uint64_t id : orders.cancelled) forget(id);
    std::vector<std::int64_t> load(static_cast<std::size_t>(seat.mesh.shape().dp), 0);
    for (const auto& [id, rank] : placed) load[static_cast<std::size_t>(rank)] += asked.at(id);
    for (const TextRequest& request : orders.requests) {
      check(request);
      TESSERA_CHECK(!asked.contains(request.id), "request ", request.id, " is under way already");
      const auto least = std::ranges::min_element(load) - load.begin();
      asked[request.id] = texts_of(request.options);
      load[static_cast<std::size_t>(least)] += asked[request.id];
      placed[request.id] = static_cast<int>(least);
      result.requests.push_back({request, static_cast<int>(least)});
    }
    return result;
  }

  void forget(std::uint64_t id) {
    asked.erase(id);
    placed.erase(id);
  }

  void check(const TextRequest& request) const {
    check_prompts(seat.model, {request.prompt}, request.options);
    TESSERA_CHECK(!request.options.stop && !request.options.on_token,
                  "a request cannot have a `stop` or `on_token` of its own: news are told by round()");
  }

  void obey(PlacedOrders orders) {
    for (const std::uint64_t id : orders.cancelled) cancel(id);
    for (PlacedRequest& each : orders.requests) {
      if (each.data_rank == seat.mesh.coordinates().dp) enter(std::move(each.request));
    }
  }

  void cancel(std::uint64_t id) {
    const auto own = [&](const Unit& unit) { return static_cast<std::uint64_t>(unit.prompt) == id; };
    for (auto& [width, group] : groups) {
      std::erase_if(group.waiting, [&](const auto& unit) { return own(*unit); });
      group.batch->each([&](Unit& unit) { unit.done = unit.done || own(unit); });
      group.batch->drop_done();
    }
    std::erase_if(news, [&](const TextNews& each) { return each.id == id; });
    live.erase(id);
  }

  void enter(TextRequest request) {
    const std::uint64_t id = request.id;
    Live& own = live[id];
    own.start = {request.options.decoder_start};
    own.request = std::move(request);
    const GenerationOptions& o = own.request.options;
    const std::int64_t most_new = most_new_tokens(seat.model, own.request.prompt, o);
    if (most_new == 0 && !o.prompt_logprobs) {
      for (std::int64_t s = 0; s < texts_of(o); ++s) tell({.id = id, .sample = s, .text = {}, .done = true});
      live.erase(id);
      return;
    }
    seat.model.reserve_positions(seat.ctx, longest_of(seat.model, own.request.prompt, o));
    const std::int64_t width = o.num_beams;
    auto at = groups.find(width);
    if (at == groups.end()) {
      // As many rows of the cache whatever the width.
      const BatchOptions batch{.width = width,
                               .texts = std::max<std::int64_t>(1, options.batch_size / width),
                               .prefill_chunk = options.prefill_chunk};
      at = groups.try_emplace(width, std::make_unique<DecodeBatch>(seat, batch)).first;
    }
    add_units(at->second.waiting, o, static_cast<std::int64_t>(id), o.first_sample, own.request.prompt,
              seat.model.reads_encoder_tokens() ? &own.start : nullptr, most_new);
  }

  void tell(TextNews each) {
    if (speaks) news.push_back(std::move(each));
  }

  /// What is new of a text that is drawn.
  void report(Unit& unit, bool done) {
    const auto id = static_cast<std::uint64_t>(unit.prompt);
    std::size_t& told = live.at(id).told[unit.sample];
    TextNews each{.id = id, .sample = unit.sample, .text = {}, .done = done};
    each.prompt_logprobs = static_cast<std::int64_t>(unit.prompt_logprobs.size());
    each.text.logprobs = std::exchange(unit.prompt_logprobs, {});
    each.text.top_logprobs = std::exchange(unit.prompt_likeliest, {});
    const std::size_t count = unit.most_new > 0 ? unit.text[0].size() : 0;
    const auto rest = [&](const auto& from, auto& to) {
      for (std::size_t i = told; i < std::min(count, from.size()); ++i) to.push_back(from[i]);
    };
    rest(unit.text[0], each.text.tokens);
    rest(unit.logprobs[0], each.text.logprobs);
    rest(unit.likeliest, each.text.top_logprobs);
    each.text.stopped = done && unit.stopped && unit.most_new > 0;
    told = count;
    if (done || !each.text.tokens.empty()) tell(std::move(each));
  }

  void finish(Unit& unit) {
    const auto id = static_cast<std::uint64_t>(unit.prompt);
    const auto own = live.find(id);
    if (own == live.end()) return;  // cancelled
    const GenerationOptions& o = own->second.request.options;
    if (o.num_beams == 1) {
      report(unit, true);
    } else if (speaks) {
      const Generated texts = best_of(unit, o);
      for (std::size_t i = 0; i < texts.size(); ++i)
        tell({.id = id, .sample = static_cast<std::int64_t>(i), .text = texts[i], .done = true});
    }
    ended.push_back(id);
  }

  /// Requests whose last text has ended are known no more.
  void clear_ended() {
    for (const std::uint64_t id : ended) {
      const auto own = live.find(id);
      if (own == live.end()) continue;
      const std::int64_t texts = own->second.request.options.num_samples;
      if (++own->second.finished == texts) live.erase(own);
    }
    ended.clear();
  }

  void compute() {
    for (auto at = groups.begin(); at != groups.end();) {
      auto& [width, group] = *at;
      if (group.batch->units() > 0 || !group.waiting.empty())
        group.batch->round(group.waiting, [&](Unit& unit) { finish(unit); });
      if (!group.batch->failure().empty()) {
        fail(group);
      } else if (width == 1 && speaks) {
        group.batch->each([&](Unit& unit) { report(unit, false); });
      }
      clear_ended();
      const bool idle = group.batch->units() == 0 && group.waiting.empty();
      // Beams are rare: their cache goes with them. After a failure nothing of a batch is of use.
      at = (idle && width > 1) || !group.batch->failure().empty() ? groups.erase(at) : std::next(at);
    }
  }

  /// On rank 0: texts that are done. News of requests that were cancelled meanwhile are none.
  void count(std::vector<TextNews>& all) {
    std::erase_if(all, [&](const TextNews& each) {
      const auto at = asked.find(each.id);
      if (at == asked.end()) return true;
      if (!each.failure.empty() || (each.done && --at->second == 0)) forget(each.id);
      return false;
    });
  }

  void fail(Group& group) {
    std::vector<std::uint64_t> ids;
    const auto add = [&](const Unit& unit) { ids.push_back(static_cast<std::uint64_t>(unit.prompt)); };
    group.batch->each(add);
    for (const auto& unit : group.waiting) add(*unit);
    for (const std::uint64_t id : ids) {
      if (live.erase(id) > 0) tell(failed(id, group.batch->failure()));
    }
  }
};

/// The first byte of what a rank other than 0 says: whether it gives a note.
constexpr char kNote = '!', kNoNote = '.';

ContinuousGenerator::ContinuousGenerator(Engine& engine, const ContinuousOptions& options)
    : state_(new State{.seat = Seat::of(engine), .options = options}) {
  TESSERA_CHECK(options.batch_size >= 1 && options.prefill_chunk >= 1, "batch_size (", options.batch_size,
                ") and prefill_chunk (", options.prefill_chunk, ") must be 1 or more");
  state_->speaks = state_->seat.speaks();
  state_->seat.model.check_generates(0);
  if (state_->seat.hold_weights) state_->weights = state_->seat.hold_weights();
}

ContinuousGenerator::~ContinuousGenerator() = default;
ContinuousGenerator::ContinuousGenerator(ContinuousGenerator&&) noexcept = default;

void ContinuousGenerator::check(const TextRequest& request) const { state_->check(request); }

ContinuousGenerator::Round ContinuousGenerator::round(const Orders& orders, bool note) {
  State& state = *state_;
  Communicator& world = state.world();
  const bool first = world.rank() == 0;
  Round result;
  PlacedOrders placed;
  if (first) placed = state.place(orders);
  if (world.size() > 1) {
    const std::string mine = first ? packed(placed) : (note ? kNote : kNoNote) + packed(state.news);
    const std::vector<std::string> told = all_gather_bytes(world, mine);
    if (!first) {
      state.news.clear();
      placed = unpacked_orders(told[0]);
    }
    for (std::size_t rank = 1; first && rank < told.size(); ++rank) {
      result.noted = result.noted || told[rank].at(0) == kNote;
      std::ranges::move(unpacked_news(told[rank].substr(1)), std::back_inserter(result.news));
    }
  }
  result.end = placed.end;
  if (!result.end) {
    state.obey(std::move(placed));
    state.compute();
  }
  if (!first) return result;
  std::ranges::move(std::exchange(state.news, {}), std::back_inserter(result.news));
  state.count(result.news);
  result.busy = !state.asked.empty();
  return result;
}

}  // namespace tessera
