#include "engine/generation/device_decoder.hpp"

#include <algorithm>
#include <cstring>

#include "engine/generation/drawer.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera::generation {
namespace {

/// Keys that a graph's attention looks at grow by so many.
constexpr std::int64_t kExtent = 256;

constexpr std::int64_t words_of(std::int64_t bytes) { return bytes / 4; }

std::vector<const Unit*> units_of(const Lane& lane) {
  std::vector<const Unit*> units;
  lane.each([&](const Unit& unit) { units.push_back(&unit); });
  return units;
}

SamplingRow row_of(const Unit& unit) {
  const GenerationOptions& o = *unit.options;
  const bool greedy = o.temperature == 0.0 || o.top_k == 1;
  return {.seed = o.seed,
          .sample = unit.number,
          .position = static_cast<std::int64_t>(unit.tokens->size()) + unit.new_tokens(),
          .new_tokens = unit.new_tokens(),
          .min_new_tokens = o.min_new_tokens,
          .top_k = greedy ? 1 : o.top_k,
          .temperature = greedy ? 1.0 : o.temperature,
          .top_p = top_p_of(unit, o),
          .top_p_decay = o.top_p_decay != 0.0 ? o.top_p_decay : 1.0,
          .top_p_bound = o.top_p_decay != 0.0 ? o.top_p_bound : 0.0,
          .repetition_penalty = static_cast<float>(o.repetition_penalty),
          .logprob = o.logprobs ? 1 : 0};
}

/// One bit for each token of a vocabulary.
class Bits {
 public:
  explicit Bits(std::int64_t vocab) : vocab_(vocab), words_(static_cast<std::size_t>((vocab + 31) / 32)) {}
  void add(const std::vector<std::int32_t>& tokens) {
    for (const std::int32_t token : tokens) {
      if (token >= 0 && token < vocab_) words_[static_cast<std::size_t>(token) / 32] |= 1u << (token % 32);
    }
  }
  void append_to(std::vector<std::int32_t>& all) const {
    for (const std::uint32_t word : words_) all.push_back(static_cast<std::int32_t>(word));
  }

 private:
  std::int64_t vocab_;
  std::vector<std::uint32_t> words_;
};

}  // namespace

DeviceDecoder::DeviceDecoder(const ExecCtx& ctx, Model& model, AutoSwitch graphs)
    : ctx_(ctx), model_(model), graphs_(graphs), graph_(ctx.stream) {
  ctx_.allocator = std::make_shared<CachingAllocator>(ctx.stream);
}

bool DeviceDecoder::serves(const Lane& lane) const {
  const std::vector<const Unit*> units = units_of(lane);
  return !units.empty() && !model_.reads_encoder_tokens() && std::ranges::all_of(units, [](const Unit* unit) {
    return unit->options->num_beams == 1 && unit->options->top_logprobs == 0;
  });
}

std::vector<DeviceDecoder::Place> DeviceDecoder::places(const Lane& lane) const {
  std::vector<Place> all;
  lane.each([&](const Unit& unit) { all.push_back({unit.prompt, unit.sample, unit.length}); });
  return all;
}

void DeviceDecoder::load(const Lane& lane) {
  const std::vector<const Unit*> units = units_of(lane);
  const auto n = static_cast<std::int64_t>(units.size());
  if (!all_.rows) {
    const auto of = [&](std::int64_t words) { return Tensor::empty(ctx_, {lane.rows(), words}, DType::i32); };
    all_.rows = of(words_of(sizeof(SamplingRow)));
    all_.drawn = of(words_of(sizeof(DrawnToken)));
    all_.tokens = of(1), all_.positions = of(1), all_.lengths = of(1);
    for (Result& result : results_)
      result.memory = ctx_.allocator->host_memory(static_cast<std::size_t>(lane.rows()) * sizeof(DrawnToken));
  }
  std::vector<SamplingRow> rows;
  std::vector<std::int32_t> tokens, positions, lengths;
  for (const Unit* unit : units) {
    rows.push_back(row_of(*unit));
    tokens.push_back(unit->text[0].back());
    positions.push_back(static_cast<std::int32_t>(unit->length));
    lengths.push_back(static_cast<std::int32_t>(unit->length + 1));
  }
  const auto put = [&](const Tensor& to, const void* values) {
    const Tensor own = to.narrow(0, 0, n);
    own.copy_from_host(values);
    return own;
  };
  used_ = {};
  used_.rows = put(all_.rows, rows.data());
  used_.drawn = all_.drawn.narrow(0, 0, n);
  used_.tokens = put(all_.tokens, tokens.data()).view({n});
  used_.positions = put(all_.positions, positions.data()).view({n});
  used_.lengths = put(all_.lengths, lengths.data()).view({n});
  used_.greedy = std::ranges::all_of(rows, [](const SamplingRow& row) { return row.top_k == 1; });
  load_bits(units);
}

void DeviceDecoder::load_bits(const std::vector<const Unit*>& units) {
  const auto any = [&](auto asks) { return std::ranges::any_of(units, asks); };
  const std::int64_t vocab = model_.vocab_size(), rows = all_.rows.size(0);
  const auto put = [&](Tensor& all, auto add) {
    std::vector<std::int32_t> words;
    for (const Unit* unit : units) {
      Bits bits(vocab);
      add(*unit, bits);
      bits.append_to(words);
    }
    if (!all) all = Tensor::empty(ctx_, {rows, (vocab + 31) / 32}, DType::i32);
    const Tensor own = all.narrow(0, 0, static_cast<std::int64_t>(units.size()));
    own.copy_from_host(words.data());
    return own;
  };
  if (any([](const Unit* unit) { return unit->options->repetition_penalty != 1.0; }))
    used_.seen = put(all_.seen, [](const Unit& unit, Bits& bits) {
      bits.add(*unit.tokens);
      bits.add(unit.text[0]);
    });
  if (any([](const Unit* unit) { return unit->new_tokens() < unit->options->min_new_tokens; }))
    used_.stops = put(all_.stops, [](const Unit& unit, Bits& bits) { bits.add(unit.options->stop_tokens); });
}

void DeviceDecoder::compute(Lane& lane, std::int64_t ahead, std::int64_t extent) {
  const std::int64_t n = used_.tokens.numel();
  MicroBatch input;
  input.batch = n;
  input.seq_length = 1;
  input.tokens = used_.tokens.view({1, n});
  input.positions = used_.positions;
  CachePass place{.cache = &lane.cache(), .longest = extent, .key_end = used_.lengths};
  lane.each([&](const Unit& unit) { place.lengths.push_back(unit.length + 1 + ahead); });
  const Forward forward{.exec = ctx_, .input = input, .cache = &place};
  const Tensor logits = model_.run_piece(forward, 0, {}, Model::Output::own_logits, Tensor()).at(0).value();
  TESSERA_CHECK(logits.numel() == n * model_.vocab_size(), "a model returned logits ", logits.shape(),
                " for ", n, " texts of one position");
  const Tensor rows = logits.is_contiguous() ? logits : ops::contiguous(ctx_, logits);
  ops::sample_tokens(ctx_, rows.view({n, model_.vocab_size()}), used_);
}

void DeviceDecoder::launch(Lane& lane, std::int64_t ahead) {
  const std::int64_t needed = lane.longest() + 1 + ahead;
  const std::int64_t extent = std::min(lane.cache().capacity, (needed + kExtent - 1) / kExtent * kExtent);
  const std::string key = detail::concat(used_.tokens.numel(), " texts, ", extent, " keys, cache ",
                                         lane.cache_number(), used_.greedy ? ", greedy" : "",
                                         used_.seen ? ", penalties" : "", used_.stops ? ", stops" : "");
  const auto work = [&] { compute(lane, ahead, extent); };
  if (graphs_ == AutoSwitch::off) {
    work();
  } else if (!graph_.replay(key)) {
    try {
      graph_.run(key, work);
    } catch (const DeviceError&) {
      if (graphs_ == AutoSwitch::on) throw;
      graphs_ = AutoSwitch::off;  // nothing of it was launched
      work();
    }
  }
  Result& result = results_[passes_++ % 2];
  ctx_.stream->copy(result.memory.get(), used_.drawn.raw(), used_.drawn.nbytes());
  ctx_.stream->record(result.ready);
  cache_ = lane.cache_number();
}

std::vector<DrawnToken> DeviceDecoder::next(Lane& lane) {
  std::vector<Place> here = places(lane);
  if (!ahead_ || here != expected_ || cache_ != lane.cache_number()) {
    load(lane);
    launch(lane, 0);
  }
  Result& result = results_[(passes_ - 1) % 2];
  // A text that ends with this token by its length has no next one; a cache that grows before it has not its
  // keys.
  ahead_ = lane.cache().capacity >= lane.longest() + 1 + kRoom;
  lane.each([&](const Unit& unit) { ahead_ = ahead_ && unit.new_tokens() + 1 < unit.most_new; });
  if (ahead_) launch(lane, 1);
  for (Place& place : here) ++place.length;
  expected_ = std::move(here);
  return read(result, expected_.size());
}

std::vector<DrawnToken> DeviceDecoder::read(Result& result, std::size_t count) const {
  result.ready.synchronize();
  std::vector<DrawnToken> drawn(count);
  std::memcpy(drawn.data(), result.memory.get(), count * sizeof(DrawnToken));
  for (const DrawnToken& each : drawn) {
    TESSERA_CHECK(each.failure != DrawnToken::not_finite, "the logits of ", model_.vocab_size(),
                  " tokens are not finite: the weights are damaged or training diverged");
    TESSERA_CHECK(each.failure != DrawnToken::no_token_left,
                  "no token is left to draw: every one has probability 0");
  }
  return drawn;
}

}  // namespace tessera::generation
