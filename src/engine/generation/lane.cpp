#include "engine/generation/lane.hpp"

#include <algorithm>

#include "tessera/ops/elementwise.hpp"

namespace tessera::generation {
namespace {

/// The cache grows to multiples of this many positions.
constexpr std::int64_t kStep = 64;

std::int64_t size_of_prompt(const Unit& unit) { return static_cast<std::int64_t>(unit.tokens->size()); }

}  // namespace

Lane::Lane(const ExecCtx& ctx, Model& model, std::int64_t width, std::int64_t most_units)
    : ctx_(ctx), model_(model), width_(width), most_units_(most_units) {}

void Lane::enter(std::vector<std::unique_ptr<Unit>> units) {
  std::ranges::stable_sort(
      units, [](const auto& a, const auto& b) { return size_of_prompt(*a) > size_of_prompt(*b); });
  std::ranges::move(units, std::back_inserter(units_));
}

std::vector<Pass> Lane::prefill(std::int64_t chunk) const {
  std::vector<Pass> passes;
  if (read_ == units()) return passes;
  const auto fresh = std::span(units_).subspan(static_cast<std::size_t>(read_));
  const std::int64_t longest = size_of_prompt(*fresh.front());
  for (std::int64_t begin = 0; begin < longest; begin += chunk) {
    Pass pass{
        .row0 = read_ * width_, .seq = std::min(chunk, longest - begin), .begin = begin, .prefill = true};
    for (const auto& unit : fresh) pass.batch += size_of_prompt(*unit) > begin ? 1 : 0;
    for (std::int64_t i = 0; i < pass.batch; ++i) {
      const std::int64_t at = size_of_prompt(*fresh[static_cast<std::size_t>(i)]) - 1 - begin;
      if (at >= pass.seq) continue;
      pass.drawn.push_back(fresh[static_cast<std::size_t>(i)].get());
      pass.last.push_back(static_cast<std::int32_t>(at * pass.batch + i));
    }
    passes.push_back(std::move(pass));
  }
  return passes;
}

void Lane::spread() {
  const std::int64_t first = read_ * width_, fresh = units() - read_;
  // From the last one on, so that no row is written over before it was copied.
  for (std::int64_t i = fresh - 1; i >= 0 && width_ > 1; --i) {
    const std::int64_t length = units_[static_cast<std::size_t>(read_ + i)]->length;
    for (std::int64_t beam = width_ - 1; beam >= 0; --beam)
      copy_row(first + i, first + i * width_ + beam, length);
  }
  read_ = units();
}

Pass Lane::decode() const {
  Pass pass{.batch = units() * width_, .seq = 1};
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
  const std::int64_t needed = longest() + more, rows = most_units_ * width_;
  if (units_.empty() || (cache_.capacity >= needed && cache_.rows == rows)) return;
  // By half of what there is, so that few texts are copied often.
  const std::int64_t wanted = std::max(needed, cache_.capacity + cache_.capacity / 2);
  KvCache grown = model_.make_cache(ctx_, rows, (wanted + kStep - 1) / kStep * kStep);
  const std::int64_t kept = std::min(cache_.capacity, longest());
  for (std::size_t i = 0; i < cache_.key.size() && kept > 0; ++i) {
    if (!cache_.key[i]) continue;
    ops::copy(ctx_, cache_.key[i].narrow(2, 0, kept), grown.key[i].narrow(2, 0, kept));
    ops::copy(ctx_, cache_.value[i].narrow(2, 0, kept), grown.value[i].narrow(2, 0, kept));
  }
  cache_ = std::move(grown);
}

MicroBatch Lane::input(const Pass& pass) const {
  std::vector<std::int32_t> tokens, positions;
  if (pass.prefill) {
    const auto* unit = units_.data() + read_;
    for (std::int64_t s = 0; s < pass.seq; ++s) {
      for (std::int64_t i = 0; i < pass.batch; ++i) {
        // Behind the end of a prompt stands anything: nothing before it looks there, and it is written over.
        const auto& prompt = *unit[i]->tokens;
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
  return input;
}

CachePass Lane::place(const Pass& pass) {
  CachePass place{.cache = &cache_, .row0 = pass.row0, .begin = pass.begin};
  if (pass.prefill) {
    place.last = Tensor::from(ctx_, pass.last, {static_cast<std::int64_t>(pass.last.size())});
    return place;
  }
  std::vector<std::int32_t> ends;
  for (const auto& unit : units_) {
    place.lengths.insert(place.lengths.end(), static_cast<std::size_t>(width_), unit->length + 1);
    ends.insert(ends.end(), static_cast<std::size_t>(width_), static_cast<std::int32_t>(unit->length + 1));
    place.longest = std::max(place.longest, unit->length + 1);
  }
  place.key_end = Tensor::from(ctx_, ends, {pass.batch});
  return place;
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
  // A row that is continued is continued in its place at least, so that no row is written over before it was
  // copied.
  for (std::size_t i = 0; i < choice.tokens.size(); ++i) {
    const std::int32_t parent = choice.parents[i];
    if (parent == static_cast<std::int32_t>(i)) continue;
    unit.text[i] = unit.text[static_cast<std::size_t>(parent)];
    if (spread_out && !unit.done) copy_row(row + parent, row + static_cast<std::int64_t>(i), unit.length);
  }
  for (std::size_t i = 0; i < choice.tokens.size(); ++i) unit.text[i].push_back(choice.tokens[i]);
}

std::int64_t Lane::row_of(const Unit& unit) const {
  const auto at = std::ranges::find(units_, &unit, [](const auto& each) { return each.get(); });
  return (at - units_.begin()) * width_;
}

void Lane::copy_row(std::int64_t from, std::int64_t to, std::int64_t length) {
  if (from == to || length == 0) return;
  for (std::vector<Tensor>* side : {&cache_.key, &cache_.value}) {
    for (const Tensor& kept : *side) {
      if (kept)
        ops::copy(ctx_, kept.narrow(0, from, 1).narrow(2, 0, length),
                  kept.narrow(0, to, 1).narrow(2, 0, length));
    }
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
    if (u + 1 < units_.size()) {
      const auto last = static_cast<std::int64_t>(units_.size()) - 1;
      if (!units_.back()->done) {
        for (std::int64_t beam = 0; beam < width_; ++beam)
          copy_row(last * width_ + beam, static_cast<std::int64_t>(u) * width_ + beam, units_.back()->length);
      }
      units_[u] = std::move(units_.back());
    }
    units_.pop_back();
  }
  read_ = units();
  return left;
}

}  // namespace tessera::generation
