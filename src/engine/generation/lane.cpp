#include "engine/generation/lane.hpp"

#include <algorithm>

#include "tessera/ops/elementwise.hpp"

namespace tessera::generation {
namespace {

/// By half of what there is, so that little is copied often.
std::int64_t grown(std::int64_t has, std::int64_t wants) {
  return has >= wants ? has : std::max(wants, has + has / 2);
}
/// The same for positions, in whole pages.
std::int64_t grown_positions(std::int64_t has, std::int64_t wants) {
  return has >= wants ? has : cache_pages(grown(has, wants)) * kCachePage;
}

std::int64_t size_of_prompt(const Unit& unit) { return static_cast<std::int64_t>(unit.tokens->size()); }
/// Of what a model reads, be it by an encoder.
std::int64_t size_of_reading(const Unit& unit) {
  return unit.encoded != nullptr ? static_cast<std::int64_t>(unit.encoded->size()) : size_of_prompt(unit);
}

}  // namespace

std::vector<std::int32_t> Pass::asked() const {
  std::vector<std::int32_t> rows = last;
  std::ranges::sort(rows);
  rows.erase(std::ranges::unique(rows).begin(), rows.end());
  return rows;
}

Lane::Lane(const ExecCtx& ctx, Model& model, std::int64_t width, std::int64_t most_units)
    : ctx_(ctx), model_(model), width_(width), most_units_(most_units), pages_(most_units * width) {}

void Lane::enter(std::vector<std::unique_ptr<Unit>> units) {
  std::ranges::stable_sort(
      units, [](const auto& a, const auto& b) { return size_of_reading(*a) > size_of_reading(*b); });
  std::ranges::move(units, std::back_inserter(units_));
}

std::vector<const Unit*> Lane::fresh_prompts() const {
  std::vector<const Unit*> prompts;
  for (auto u = static_cast<std::size_t>(read_); u < units_.size(); ++u) {
    if (prompts.empty() || prompts.back()->prompt != units_[u]->prompt) prompts.push_back(units_[u].get());
  }
  return prompts;
}

std::vector<Unit*> Lane::samples_of(const Unit& prompt) const {
  std::vector<Unit*> samples;
  for (auto u = static_cast<std::size_t>(read_); u < units_.size(); ++u) {
    if (units_[u]->prompt == prompt.prompt) samples.push_back(units_[u].get());
  }
  return samples;
}

void Lane::add_scored(Pass& pass) const {
  for (std::int64_t i = 0; i < pass.batch; ++i) {
    const Unit& prompt = *pass.read[static_cast<std::size_t>(i)];
    if (!prompt.options->prompt_logprobs) continue;
    const std::vector<Unit*> samples = samples_of(prompt);
    const std::int64_t end = std::min(pass.seq, size_of_prompt(prompt) - 1 - pass.begin);
    for (std::int64_t s = 0; s < end; ++s) {
      pass.scored.push_back({(*prompt.tokens)[static_cast<std::size_t>(pass.begin + s + 1)], samples});
      pass.last.push_back(static_cast<std::int32_t>(s * pass.batch + i));
    }
  }
}

Pass Lane::prompt_pass(std::span<const Unit* const> prompts, std::int64_t first, std::int64_t begin,
                       std::int64_t seq) const {
  Pass pass{.row0 = read_ * width_ + first,
            .batch = static_cast<std::int64_t>(prompts.size()),
            .seq = seq,
            .begin = begin,
            .capacity = cache_.capacity,
            .prefill = true,
            .read = {prompts.begin(), prompts.end()}};
  add_scored(pass);
  for (std::int64_t i = 0; i < pass.batch; ++i) {
    const Unit& prompt = *prompts[static_cast<std::size_t>(i)];
    const std::int64_t at = size_of_prompt(prompt) - 1 - begin;
    if (at >= seq) continue;
    for (Unit* sample : samples_of(prompt)) {
      pass.drawn.push_back(sample);
      pass.last.push_back(static_cast<std::int32_t>(at * pass.batch + i));
    }
  }
  return pass;
}

std::vector<Pass> Lane::encoder_passes(std::span<const Unit* const> prompts, std::int64_t chunk) const {
  std::vector<Pass> passes;
  for (std::size_t first = 0; first < prompts.size();) {
    const std::int64_t longest = size_of_reading(*prompts[first]);
    const auto count = std::min(static_cast<std::size_t>(std::max<std::int64_t>(1, chunk / longest)),
                                prompts.size() - first);
    passes.push_back(prompt_pass(prompts.subspan(first, count), static_cast<std::int64_t>(first), 0,
                                 size_of_prompt(*prompts[first])));
    passes.back().encoder_seq = longest;
    first += count;
  }
  return passes;
}

std::vector<Pass> Lane::prefill(std::int64_t chunk) const {
  std::vector<Pass> passes;
  if (read_ == units()) return passes;
  const std::vector<const Unit*> prompts = fresh_prompts();
  if (model_.reads_encoder_tokens()) return encoder_passes(prompts, chunk);
  const std::int64_t longest = size_of_prompt(*prompts.front());
  // Logits of all positions are many: no more of them at once than of one prompt.
  if (std::ranges::any_of(prompts, [](const Unit* p) { return p->options->prompt_logprobs; }))
    chunk = std::max<std::int64_t>(1, chunk / static_cast<std::int64_t>(prompts.size()));
  for (std::int64_t begin = 0; begin < longest; begin += chunk) {
    const auto left =
        std::ranges::find_if(prompts, [&](const Unit* p) { return size_of_prompt(*p) <= begin; });
    passes.push_back(
        prompt_pass(std::span(prompts.begin(), left), 0, begin, std::min(chunk, longest - begin)));
  }
  return passes;
}

void Lane::spread() {
  const std::vector<const Unit*> prompts = fresh_prompts();
  auto prompt = static_cast<std::int64_t>(prompts.size()) - 1;
  const std::int64_t first = read_ * width_;
  // From the last one on, so that no row becomes another's before it was shared.
  for (std::int64_t i = units() - read_ - 1; i >= 0; --i) {
    const Unit& unit = *units_[static_cast<std::size_t>(read_ + i)];
    if (prompts[static_cast<std::size_t>(prompt)]->prompt != unit.prompt) --prompt;
    for (std::int64_t beam = width_ - 1; beam >= 0; --beam) {
      const std::int64_t from = first + prompt, to = first + i * width_ + beam;
      if (from == to) continue;
      pages_.share(from, to, unit.length);
      copy_encoded(from, to);
    }
  }
  read_ = units();
}

Pass Lane::decode() const {
  Pass pass{.batch = units() * width_, .seq = 1, .capacity = cache_.capacity};
  for (const auto& unit : units_) pass.drawn.push_back(unit.get());
  return pass;
}

std::int64_t Lane::longest() const {
  std::int64_t longest = 0;
  for (const auto& unit : units_)
    longest = std::max(longest, unit->length > 0 ? unit->length : size_of_prompt(*unit));
  return longest;
}

void Lane::reserve(std::int64_t more) {
  if (units_.empty()) return;
  std::int64_t encoded = 0;
  for (const auto& unit : units_)
    if (unit->encoded != nullptr) encoded = std::max(encoded, size_of_reading(*unit));
  reserve_tables(longest() + more, encoded);
  own_next(more);
  const std::vector<const Unit*> prompts = fresh_prompts();
  for (std::size_t i = 0; i < prompts.size(); ++i)
    pages_.own(read_ * width_ + static_cast<std::int64_t>(i), 0, size_of_prompt(*prompts[i]));
  settle_pages();
}

void Lane::own_next(std::int64_t more) {
  for (std::int64_t row = 0; row < read_ * width_; ++row) {
    const std::int64_t length = units_[static_cast<std::size_t>(row / width_)]->length;
    pages_.own(row, length, length + more);
  }
}

void Lane::reserve_tables(std::int64_t positions, std::int64_t encoded) {
  const bool fresh = cache_.rows == 0;
  if (!fresh && cache_.capacity >= positions && cache_.encoder_capacity >= encoded) return;
  const std::int64_t capacity = grown_positions(cache_.capacity, positions);
  if (fresh || cache_.encoder_capacity < encoded) {
    KvCache made = model_.make_cache(ctx_, rows(), 0, grown_positions(cache_.encoder_capacity, encoded));
    const auto keep = [&](const std::vector<Tensor>& from, const std::vector<Tensor>& to) {
      for (std::size_t i = 0; i < from.size() && cache_.encoder_capacity > 0; ++i)
        if (from[i]) ops::copy(ctx_, from[i], to[i].narrow(2, 0, cache_.encoder_capacity));
    };
    keep(cache_.cross_key, made.cross_key);
    keep(cache_.cross_value, made.cross_value);
    if (!fresh) made.key = std::move(cache_.key), made.value = std::move(cache_.value);
    made.rows = rows();  // a model of a user's own may hand back an empty cache
    made.encoder_capacity = grown_positions(cache_.encoder_capacity, encoded);
    cache_ = std::move(made);
  }
  // Where positions are told apart by their distance, this is how many of them there may be.
  if (encoded > 0) model_.reserve_positions(ctx_, std::min(capacity, model_.position_limit()));
  cache_.capacity = capacity;
  cache_.pages = Tensor();  // made by settle_pages
  ++cache_number_;
}

void Lane::grow_pools(std::int64_t pages) {
  // Layer by layer: not all of them are there twice at once.
  for (auto* side : {&cache_.key, &cache_.value}) {
    for (Tensor& kept : *side) {
      if (!kept) continue;
      const std::int64_t before = kept.size(0);
      const Tensor larger =
          Tensor::empty(ctx_, {pages, kept.size(1), kept.size(2), kept.size(3)}, kept.dtype());
      if (before > 0) ops::copy(ctx_, kept, larger.narrow(0, 0, before));
      // A key that a query does not see has the weight 0 on some devices, and 0 times anything is not always
      // 0.
      ops::fill_zero(ctx_, larger.narrow(0, before, pages - before));
      kept = larger;
    }
  }
  pool_ = pages;
  ++cache_number_;
}

void Lane::settle_pages() {
  if (pages_.made() > pool_) grow_pools(grown(pool_, pages_.made()));
  for (const Pages::Copy& each : pages_.take_copies()) {
    for (const auto* side : {&cache_.key, &cache_.value}) {
      for (const Tensor& kept : *side)
        if (kept) ops::copy(ctx_, kept.narrow(0, each.from, 1), kept.narrow(0, each.to, 1));
    }
  }
  if (!pages_.take_changed() && cache_.pages) return;
  const auto entries = static_cast<std::size_t>(cache_pages(cache_.capacity));
  std::vector<std::int32_t> table(static_cast<std::size_t>(rows()) * entries, 0);
  for (std::int64_t row = 0; row < rows(); ++row)
    std::ranges::copy(pages_.of(row), table.begin() + row * static_cast<std::ptrdiff_t>(entries));
  const Tensor now = Tensor::from(ctx_, table, {rows(), static_cast<std::int64_t>(entries)});
  if (!cache_.pages) {
    cache_.pages = now;
  } else {
    ops::copy(ctx_, now, cache_.pages);  // where it was: recorded passes read it there
  }
}

std::shared_ptr<const MicroBatch> Lane::encoder_input(const Pass& pass) const {
  auto input = std::make_shared<MicroBatch>();
  std::vector<std::int32_t> tokens, positions, ends;
  for (std::int64_t s = 0; s < pass.encoder_seq; ++s) {
    for (const Unit* unit : pass.read) {
      // Behind the end of a prompt stands anything: nobody reads its keys.
      const std::vector<std::int32_t>& prompt = *unit->encoded;
      tokens.push_back(prompt[std::min(static_cast<std::size_t>(s), prompt.size() - 1)]);
      positions.push_back(static_cast<std::int32_t>(s));
    }
  }
  for (const Unit* unit : pass.read) ends.push_back(static_cast<std::int32_t>(unit->encoded->size()));
  input->batch = pass.batch;
  input->seq_length = pass.encoder_seq;
  input->tokens = Tensor::from(ctx_, tokens, {pass.encoder_seq, pass.batch});
  input->positions = Tensor::from(ctx_, positions, {pass.encoder_seq * pass.batch});
  input->key_begin = Tensor::from(ctx_, std::vector<std::int32_t>(ends.size(), 0), {pass.batch});
  input->key_end = Tensor::from(ctx_, ends, {pass.batch});
  return input;
}

MicroBatch Lane::input(const Pass& pass) const {
  std::vector<std::int32_t> tokens, positions;
  if (pass.prefill) {
    for (std::int64_t s = 0; s < pass.seq; ++s) {
      for (const Unit* unit : pass.read) {
        // Behind the end of a prompt stands anything: nothing before it looks there, and it is written over.
        const auto& prompt = *unit->tokens;
        const auto at = static_cast<std::size_t>(pass.begin + s);
        tokens.push_back(prompt[std::min(at, prompt.size() - 1)]);
        positions.push_back(static_cast<std::int32_t>(std::min(at, prompt.size() - 1)));
      }
    }
  } else {
    for (const auto& unit : units_) {
      for (const auto& text : unit->text) {
        tokens.push_back(text.back());
        positions.push_back(static_cast<std::int32_t>(unit->length));
      }
    }
  }
  MicroBatch input;
  input.batch = pass.batch;
  input.seq_length = pass.seq;
  input.tokens = Tensor::from(ctx_, tokens, {pass.seq, pass.batch});
  input.positions = Tensor::from(ctx_, positions, {pass.seq * pass.batch});
  if (pass.encoder_seq > 0) input.encoder = encoder_input(pass);
  return input;
}

CachePass Lane::place(const Pass& pass) {
  CachePass place{.cache = &cache_, .row0 = pass.row0, .begin = pass.begin};
  if (pass.prefill) {
    const std::vector<std::int32_t> asked = pass.asked();
    place.last = Tensor::from(ctx_, asked, {static_cast<std::int64_t>(asked.size())});
    std::vector<std::int32_t> ends;
    for (const Unit* unit : pass.read) ends.push_back(static_cast<std::int32_t>(size_of_prompt(*unit)));
    place.key_end = Tensor::from(ctx_, ends, {pass.batch});
    place_encoded(pass, pass.read, 1, place);
    return place;
  }
  own_next(1);
  settle_pages();
  std::vector<std::int32_t> ends;
  std::vector<const Unit*> all;
  for (const auto& unit : units_) {
    place.lengths.insert(place.lengths.end(), static_cast<std::size_t>(width_), unit->length + 1);
    ends.insert(ends.end(), static_cast<std::size_t>(width_), static_cast<std::int32_t>(unit->length + 1));
    place.longest = std::max(place.longest, unit->length + 1);
    all.push_back(unit.get());
  }
  place.key_end = Tensor::from(ctx_, ends, {pass.batch});
  place_encoded(pass, all, width_, place);
  return place;
}

void Lane::place_encoded(const Pass& pass, std::span<const Unit* const> units, std::int64_t rows_each,
                         CachePass& place) const {
  if (!model_.reads_encoder_tokens()) return;
  std::vector<std::int32_t> ends;
  for (const Unit* unit : units) {
    ends.insert(ends.end(), static_cast<std::size_t>(rows_each),
                static_cast<std::int32_t>(unit->encoded->size()));
    place.encoder_longest = std::max(place.encoder_longest, size_of_reading(*unit));
  }
  place.encoder_end = Tensor::from(ctx_, ends, {pass.batch});
}

void Lane::computed(const Pass& pass) {
  for (Unit* unit : pass.drawn) {
    if (pass.prefill) {
      unit->length = size_of_prompt(*unit);
    } else if (!unit->done) {
      ++unit->length;  // texts that are done compute their last position again until they leave
    }
  }
}

void Lane::apply(Unit& unit, const Choice& choice) {
  if (unit.done) return;
  unit.done = choice.done;
  const bool spread_out = unit.text.size() == choice.tokens.size();
  unit.text.resize(choice.tokens.size());
  const std::int64_t row = row_of(unit);
  // A row that is continued is continued in its place at least, so that none becomes another's before it was
  // shared.
  for (std::size_t i = 0; i < choice.tokens.size(); ++i) {
    const std::int32_t parent = choice.parents[i];
    if (parent == static_cast<std::int32_t>(i)) continue;
    if (spread_out && !unit.done) pages_.share(row + parent, row + static_cast<std::int64_t>(i), unit.length);
    unit.text[i] = unit.text[static_cast<std::size_t>(parent)];
  }
  for (std::size_t i = 0; i < choice.tokens.size(); ++i) unit.text[i].push_back(choice.tokens[i]);
}

std::int64_t Lane::row_of(const Unit& unit) const {
  const auto at = std::ranges::find(units_, &unit, [](const auto& each) { return each.get(); });
  return (at - units_.begin()) * width_;
}

void Lane::copy_encoded(std::int64_t from, std::int64_t to) {
  for (const auto* side : {&cache_.cross_key, &cache_.cross_value}) {
    for (const Tensor& kept : *side)
      if (kept && kept.numel() > 0) ops::copy(ctx_, kept.narrow(0, from, 1), kept.narrow(0, to, 1));
  }
}

std::vector<std::unique_ptr<Unit>> Lane::leave() {
  std::vector<std::unique_ptr<Unit>> left;
  for (std::size_t u = 0; u < units_.size();) {
    if (!units_[u]->done) {
      ++u;
      continue;
    }
    left.push_back(std::move(units_[u]));
    // The last one moves to the free place.
    const std::size_t last = units_.size() - 1;
    for (std::int64_t beam = 0; beam < width_; ++beam) {
      const std::int64_t from = static_cast<std::int64_t>(last) * width_ + beam;
      const std::int64_t to = static_cast<std::int64_t>(u) * width_ + beam;
      pages_.move(from, to);
      if (last != u && !units_[last]->done) copy_encoded(from, to);
    }
    if (last != u) units_[u] = std::move(units_[last]);
    units_.pop_back();
  }
  read_ = units();
  return left;
}

}  // namespace tessera::generation
