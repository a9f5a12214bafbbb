#include "engine/generation/beams.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

namespace tessera::generation {
namespace {

/// Scores of what is not finished, as Transformers has them.
constexpr double kOpen = -1e9;

/// A text that may go on, or end.
struct Branch {
  double sum = 0;
  std::int32_t parent = 0, token = 0;
  bool ends = false, stops = false;
};

bool is_stop(const GenerationOptions& options, std::int32_t token) {
  return std::ranges::find(options.stop_tokens, token) != options.stop_tokens.end();
}

double penalised(double sum, std::int64_t tokens, const GenerationOptions& options) {
  return sum / std::pow(static_cast<double>(tokens), options.length_penalty);
}

std::vector<std::int32_t> text_of(const Unit& unit, const Branch& branch, bool with_token) {
  std::vector<std::int32_t> text = unit.text[static_cast<std::size_t>(branch.parent)];
  if (with_token) text.push_back(branch.token);
  return text;
}

/// The best branches of all beams, the best first.
std::vector<Branch> best_branches(const Unit& unit, const std::vector<std::vector<Candidate>>& rows,
                                  const GenerationOptions& options) {
  std::vector<Branch> all;
  for (std::size_t row = 0; row < rows.size(); ++row) {
    for (const Candidate& next : rows[row]) {
      all.push_back(
          {unit.sums[row] + static_cast<double>(next.score), static_cast<std::int32_t>(row), next.token});
    }
  }
  std::ranges::stable_sort(all, [](const Branch& a, const Branch& b) { return a.sum > b.sum; });
  all.resize(std::min(all.size(), static_cast<std::size_t>(candidates_per_beam(options))));
  TESSERA_CHECK(static_cast<std::int64_t>(all.size()) >= options.num_beams, "num_beams (", options.num_beams,
                ") is more than the ", all.size(), " ways on that there are: use fewer beams");
  return all;
}

void keep(Unit& unit, Hypothesis hypothesis, std::int64_t most) {
  const auto place = std::ranges::upper_bound(unit.finished, hypothesis.score, std::greater<>(),
                                              [](const Hypothesis& h) { return h.score; });
  unit.finished.insert(place, std::move(hypothesis));
  if (static_cast<std::int64_t>(unit.finished.size()) > most) unit.finished.pop_back();
}

/// The open branches, one for each row: of those that continue a row the first takes its place, and others go
/// where no row is continued. So few rows of the cache are copied, and none of them is needed elsewhere.
Choice go_on(Unit& unit, std::span<const Branch> open, bool done) {
  std::vector<const Branch*> rows(open.size(), nullptr);
  std::vector<const Branch*> others;
  for (const Branch& each : open) {
    const Branch*& place = rows[static_cast<std::size_t>(each.parent)];
    if (place == nullptr) {
      place = &each;
    } else {
      others.push_back(&each);
    }
  }
  auto next = others.begin();
  Choice choice{done, {}, {}};
  unit.sums.clear();
  for (const Branch* each : rows) {
    const Branch& own = each != nullptr ? *each : **next++;
    choice.tokens.push_back(own.token);
    choice.parents.push_back(own.parent);
    unit.sums.push_back(own.sum);
  }
  return choice;
}

/// generation/utils.py of Transformers 5: _beam_search.
Choice by_transformers(Unit& unit, std::vector<Branch> branches, const GenerationOptions& options) {
  const std::int64_t length = unit.new_tokens() + 1, beams = options.num_beams;
  for (Branch& each : branches) {
    each.stops = is_stop(options, each.token) || (options.stop && options.stop(text_of(unit, each, true)));
    each.ends = each.stops || length >= unit.most_new;
  }
  const auto full = [&] { return static_cast<std::int64_t>(unit.finished.size()) == beams; };
  const bool shut = (full() && options.early_stopping == EarlyStopping::yes) || !unit.can_improve;
  for (std::int64_t i = 0; i < beams && !shut; ++i) {
    const Branch& each = branches[static_cast<std::size_t>(i)];
    if (!each.ends) continue;
    const double score = penalised(each.sum, length, options);
    keep(unit, {score, {text_of(unit, each, true), {}, {}, score, each.stops}}, beams);
  }
  const bool nothing_open = std::ranges::all_of(branches, [](const Branch& b) { return b.ends; });
  for (Branch& each : branches) each.sum += each.ends ? kOpen : 0.0;
  std::ranges::stable_sort(branches, [](const Branch& a, const Branch& b) { return a.sum > b.sum; });
  const bool farthest = options.early_stopping == EarlyStopping::never && options.length_penalty > 0.0;
  const double hope = penalised(branches[0].sum, farthest ? unit.most_new : length, options);
  unit.can_improve = unit.can_improve && hope > (full() ? unit.finished.back().score : kOpen);
  const bool done =
      nothing_open || !unit.can_improve || (full() && options.early_stopping == EarlyStopping::yes);
  return go_on(unit, std::span(branches).first(static_cast<std::size_t>(beams)), done);
}

/// megatron/text_generation/generation.py: beam_search_and_return_on_first_stage. A hypothesis has no stop
/// token, its length counts it.
Choice by_megatron(Unit& unit, const std::vector<Branch>& branches, const GenerationOptions& options) {
  const std::int64_t length = unit.new_tokens() + 1, beams = options.num_beams;
  std::vector<Branch> open;
  for (std::size_t i = 0; i < branches.size() && static_cast<std::int64_t>(open.size()) < beams; ++i) {
    const Branch& each = branches[i];
    if (!is_stop(options, each.token)) {
      open.push_back(each);
    } else if (static_cast<std::int64_t>(i) < beams) {
      const double score = penalised(each.sum, length, options);
      keep(unit, {score, {text_of(unit, each, false), {}, {}, score, true}}, beams);
    }
  }
  TESSERA_CHECK(static_cast<std::int64_t>(open.size()) == beams, "num_beams (", beams, ") is more than the ",
                open.size(), " ways on that there are: use fewer beams");
  const bool full = static_cast<std::int64_t>(unit.finished.size()) == beams;
  bool done = full && unit.finished.back().score >= penalised(branches[0].sum, length, options);
  if (!done && length >= unit.most_new) {
    for (const Branch& each : open) {
      const double score = penalised(each.sum, length, options);
      keep(unit, {score, {text_of(unit, each, true), {}, {}, score, false}}, beams);
    }
    done = true;
  }
  return go_on(unit, open, done);
}

}  // namespace

std::int64_t candidates_per_beam(const GenerationOptions& options) {
  if (options.beam_rule == BeamRule::megatron) return 2 * options.num_beams;
  return std::max<std::int64_t>(2, 1 + static_cast<std::int64_t>(options.stop_tokens.size())) *
         options.num_beams;
}

Choice advance_beams(Unit& unit, const std::vector<std::vector<Candidate>>& rows,
                     const GenerationOptions& options) {
  if (unit.sums.empty()) unit.sums.assign(1, 0.0);
  std::vector<Branch> branches = best_branches(unit, rows, options);
  if (options.beam_rule == BeamRule::megatron) return by_megatron(unit, branches, options);
  return by_transformers(unit, std::move(branches), options);
}

Generated best_of(Unit& unit, const GenerationOptions& options) {
  Generated texts;
  for (Hypothesis& each : unit.finished) {
    if (static_cast<std::int64_t>(texts.size()) < options.num_return) texts.push_back(std::move(each.text));
  }
  return texts;
}

}  // namespace tessera::generation
