#include "engine/generation/drawer.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "engine/generation/beams.hpp"
#include "tessera/comm/placement.hpp"
#include "tessera/ops/elementwise.hpp"

namespace tessera::generation {
namespace {

bool is_greedy(const GenerationOptions& options) { return options.temperature == 0.0 || options.top_k == 1; }

/// Tokens of a row that can be drawn; 0 = all.
std::size_t most_candidates(const GenerationOptions& options) {
  if (options.num_beams > 1) return static_cast<std::size_t>(candidates_per_beam(options));
  return is_greedy(options) ? 1 : static_cast<std::size_t>(options.top_k);
}

}  // namespace

double top_p_of(const Unit& unit, const GenerationOptions& options) {
  if (options.top_p_decay == 0.0) return options.top_p;
  const double decayed =
      options.top_p * std::pow(options.top_p_decay, static_cast<double>(unit.new_tokens()));
  return std::max(decayed, options.top_p_bound);
}

Drawer::Drawer(const ExecCtx& ctx, Communicator* tensor, std::int64_t vocab_size)
    : ctx_(ctx), tensor_(tensor), vocab_size_(vocab_size), seen_(static_cast<std::size_t>(vocab_size)) {}

void Drawer::read(const Tensor& logits) {
  ctx_.stream->synchronize();
  columns_ = static_cast<std::size_t>(logits.size(-1));
  first_token_ =
      several() ? static_cast<std::int32_t>(part_of(vocab_size_, tensor_->rank(), tensor_->size()).begin) : 0;
  const int rank = logits.rank();
  const bool plain = rank == 2 || (rank == 3 && logits.size(0) == 1) || logits.is_contiguous();
  if (plain && logits.device().is_cpu() && logits.dtype() == DType::f32 && logits.strides()[rank - 1] == 1) {
    held_ = logits;
    values_ = logits.data<float>();
    stride_ = static_cast<std::ptrdiff_t>(logits.strides()[rank - 2]);
    return;
  }
  copied_ = (logits.is_contiguous() ? logits : ops::contiguous(ctx_, logits)).to_floats();
  values_ = copied_.data();
  stride_ = static_cast<std::ptrdiff_t>(columns_);
}

void Drawer::find_masses(std::size_t rows, bool sums) {
  std::vector<float> own;
  for (std::size_t i = 0; i < rows; ++i) {
    const Extent extent = extent_of(row(i));
    const bool empty = extent.largest == kNone;
    own.push_back(extent.sound ? extent.largest : std::nanf(""));
    own.push_back(sums && extent.sound && !empty ? static_cast<float>(exp_sum(row(i), extent.largest))
                                                 : 0.0f);
  }
  std::vector<float> all = own;
  if (several()) {
    const auto size = static_cast<std::int64_t>(own.size());
    const Tensor gathered = Tensor::empty(host_, {tensor_->size(), size}, DType::f32);
    tensor_->all_gather(host_, Tensor::from(host_, own, {size}), gathered).wait(host_);
    all = gathered.to_floats();
  }
  lse_.assign(rows, 0.0);
  for (std::size_t i = 0; i < rows; ++i) {
    float largest = kNone;
    double sum = 0;
    for (std::size_t at = 2 * i; at < all.size(); at += own.size()) {
      TESSERA_CHECK(!std::isnan(all[at]), "the logits of ", vocab_size_,
                    " tokens are not finite: the weights are damaged or training diverged");
      largest = std::max(largest, all[at]);
    }
    for (std::size_t at = 2 * i; at < all.size(); at += own.size()) {
      if (all[at] > kNone)
        sum += static_cast<double>(all[at + 1]) *
               std::exp(static_cast<double>(all[at]) - static_cast<double>(largest));
    }
    lse_[i] = static_cast<double>(largest) + std::log(sum);
  }
}

void Drawer::gather_rows(std::size_t rows) {
  if (!several()) return;
  const int ranks = tensor_->size();
  const auto n = static_cast<std::int64_t>(rows);
  std::vector<std::int64_t> counts;
  for (int r = 0; r < ranks; ++r) counts.push_back(n * part_of(vocab_size_, r, ranks).count);
  std::vector<float> own;
  for (std::size_t i = 0; i < rows; ++i) own.insert(own.end(), row(i).begin(), row(i).end());
  const Tensor all = Tensor::empty(host_, {n * vocab_size_}, DType::f32);
  tensor_->all_gather(host_, Tensor::from(host_, own, {static_cast<std::int64_t>(own.size())}), all, counts)
      .wait(host_);
  copied_.resize(rows * static_cast<std::size_t>(vocab_size_));
  const float* from = all.data<float>();
  for (int r = 0; r < ranks; ++r) {
    const Part part = part_of(vocab_size_, r, ranks);
    for (std::int64_t i = 0; i < n; ++i, from += part.count)
      std::copy_n(from, part.count, copied_.data() + i * vocab_size_ + part.begin);
  }
  values_ = copied_.data();
  stride_ = static_cast<std::ptrdiff_t>(vocab_size_);
  columns_ = static_cast<std::size_t>(vocab_size_);
  first_token_ = 0;
}

void Drawer::penalise(const Row& row, float penalty, double shift) {
  changed_.clear();
  const auto apply = [&](std::int32_t token) {
    const std::int64_t at = std::int64_t{token} - first_token_;
    if (at < 0 || at >= static_cast<std::int64_t>(columns_) || seen_[static_cast<std::size_t>(at)] != 0)
      return;
    seen_[static_cast<std::size_t>(at)] = 1;
    changed_.push_back(static_cast<std::int32_t>(at));
    float& score = scores_[static_cast<std::size_t>(at)];
    const float shifted = score - static_cast<float>(shift);
    score = (shifted < 0.0f ? shifted * penalty : shifted / penalty) + static_cast<float>(shift);
  };
  for (const std::int32_t token : *row.unit->tokens) apply(token);
  for (const std::int32_t token : row.unit->text[row.beam]) apply(token);
  for (const std::int32_t at : changed_) seen_[static_cast<std::size_t>(at)] = 0;
}

std::span<float> Drawer::adjusted(std::size_t i, const Row& which) {
  const GenerationOptions& options = *which.unit->options;
  const std::span<const float> raw = row(i);
  scores_.assign(raw.begin(), raw.end());
  // A beam search penalises log-probabilities, as Transformers does.
  if (options.repetition_penalty != 1.0)
    penalise(which, static_cast<float>(options.repetition_penalty), options.num_beams > 1 ? lse_[i] : 0.0);
  if (which.unit->new_tokens() < options.min_new_tokens) {
    for (const std::int32_t token : options.stop_tokens) {
      const std::int64_t at = std::int64_t{token} - first_token_;
      if (at >= 0 && at < static_cast<std::int64_t>(columns_)) scores_[static_cast<std::size_t>(at)] = kNone;
    }
  }
  return scores_;
}

std::vector<std::vector<Candidate>> Drawer::exchange(std::vector<std::vector<Candidate>> own, std::size_t k) {
  // Of each row k times score, logit and token; fewer end with a token of -1.
  std::vector<std::int32_t> words;
  for (const auto& best : own) {
    for (std::size_t j = 0; j < k; ++j) {
      const Candidate each = j < best.size() ? best[j] : Candidate{0, 0, -1};
      words.insert(words.end(), {std::bit_cast<std::int32_t>(each.score),
                                 std::bit_cast<std::int32_t>(each.raw), each.token});
    }
  }
  const auto size = static_cast<std::int64_t>(words.size());
  const Tensor all = Tensor::empty(host_, {tensor_->size(), size}, DType::i32);
  tensor_->all_gather(host_, Tensor::from(host_, words, {size}), all).wait(host_);
  if (!first()) return {};
  const auto* from = all.data<std::int32_t>();
  for (std::size_t i = 0; i < own.size(); ++i) {
    std::vector<Candidate>& best = own[i];
    best.clear();
    for (int r = 0; r < tensor_->size(); ++r) {
      const std::int32_t* at = from + r * size + static_cast<std::ptrdiff_t>(3 * k * i);
      for (std::size_t j = 0; j < k && at[2] >= 0; ++j, at += 3)
        best.push_back({std::bit_cast<float>(at[0]), std::bit_cast<float>(at[1]), at[2]});
    }
    std::ranges::sort(best, likelier);
    best.resize(std::min(best.size(), k));
  }
  return own;
}

std::vector<std::vector<Candidate>> Drawer::candidates(const std::vector<Row>& rows, std::size_t k) {
  std::vector<std::vector<Candidate>> best(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const GenerationOptions& options = *rows[i].unit->options;
    const bool plain = options.repetition_penalty == 1.0 && options.min_new_tokens == 0;
    select(plain ? row(i) : std::span<const float>(adjusted(i, rows[i])), first_token_, k, best[i]);
    for (Candidate& each : best[i]) each.raw = row(i)[static_cast<std::size_t>(each.token - first_token_)];
  }
  return several() ? exchange(std::move(best), k) : best;
}

std::vector<std::vector<Candidate>> Drawer::likeliest(std::size_t rows, std::size_t k) {
  std::vector<std::vector<Candidate>> best(rows);
  for (std::size_t i = 0; i < rows; ++i) select(row(i), first_token_, k, best[i]);
  return several() ? exchange(std::move(best), k) : best;
}

std::vector<TokenLogprob> Drawer::told(std::size_t i, const std::vector<Candidate>& best,
                                       std::int64_t count) const {
  std::vector<TokenLogprob> result;
  for (const Candidate& each : best) {
    if (static_cast<std::int64_t>(result.size()) == count) break;
    result.push_back({each.token, static_cast<float>(static_cast<double>(each.score) - lse_[i])});
  }
  return result;
}

Choice Drawer::draw_one(Unit& unit, std::size_t i, std::vector<Candidate>* from) {
  const GenerationOptions& options = *unit.options;
  const double temperature = is_greedy(options) ? 1.0 : options.temperature;
  const double top_p = top_p_of(unit, options);
  const double uniform = uniform_at(options.seed, unit.number,
                                    static_cast<std::int64_t>(unit.tokens->size()) + unit.new_tokens());
  std::int32_t token = 0;
  if (from != nullptr) {
    if (top_p > 0.0) cut_to_share(*from, temperature, top_p);
    token = generation::draw(*from, temperature, uniform);
  } else {
    const std::span<const float> scores = adjusted(i, {&unit, 0});
    if (top_p > 0.0) {
      std::vector<Candidate> best;
      select_share(scores, temperature, top_p, best);
      token = generation::draw(best, temperature, uniform);
    } else {
      token = generation::draw(scores, temperature, uniform);
    }
  }
  if (options.logprobs) {
    float raw = 0;
    if (from == nullptr) {
      raw = row(i)[static_cast<std::size_t>(token)];
    } else {
      for (const Candidate& each : *from) raw = each.token == token ? each.raw : raw;
    }
    return take_token(unit, token, static_cast<float>(static_cast<double>(raw) - lse_[i]));
  }
  return take_token(unit, token, 0.0f);
}

Choice take_token(Unit& unit, std::int32_t token, float logprob) {
  const GenerationOptions& options = *unit.options;
  if (options.logprobs) unit.logprobs[0].push_back(logprob);
  unit.stopped = std::ranges::find(options.stop_tokens, token) != options.stop_tokens.end();
  if (!unit.stopped && options.stop) {
    std::vector<std::int32_t> text = unit.text[0];
    text.push_back(token);
    unit.stopped = options.stop(text);
  }
  return {unit.stopped || unit.new_tokens() + 1 >= unit.most_new, {token}, {0}};
}

void Drawer::score(const Tensor& logits, std::span<const Scored> tokens) {
  read(logits);
  find_masses(tokens.size(), true);
  // A token's logit is with the rank that has its column.
  std::vector<float> own;
  std::int64_t most = 0;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const std::int64_t at = std::int64_t{tokens[i].token} - first_token_;
    const bool here = at >= 0 && at < static_cast<std::int64_t>(columns_);
    own.push_back(here ? row(i)[static_cast<std::size_t>(at)] : kNone);
    most = std::max(most, tokens[i].units[0]->options->top_logprobs);
  }
  if (several()) {
    const Tensor sum = Tensor::from(host_, own, {static_cast<std::int64_t>(own.size())});
    tensor_->all_reduce(host_, sum, ReduceOp::max).wait(host_);
    own = sum.to_floats();
  }
  std::vector<std::vector<Candidate>> best;
  if (most > 0) best = likeliest(tokens.size(), static_cast<std::size_t>(most));
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    for (Unit* unit : tokens[i].units) {
      unit->prompt_logprobs.push_back(static_cast<float>(static_cast<double>(own[i]) - lse_[i]));
      const std::int64_t count = unit->options->top_logprobs;
      if (count > 0 && !best.empty()) unit->prompt_likeliest.push_back(told(i, best[i], count));
    }
  }
  held_ = {};
}

Choice Drawer::advance(Unit& unit, std::size_t i, std::span<std::vector<Candidate>> best) {
  std::vector<std::vector<Candidate>> next;
  for (std::vector<Candidate>& of_beam : best) {
    next.push_back(std::move(of_beam));
    for (Candidate& each : next.back())
      each.score = static_cast<float>(static_cast<double>(each.score) - lse_[i]);
    ++i;
  }
  return advance_beams(unit, next, *unit.options);
}

std::vector<Choice> Drawer::draw(const Tensor& logits, std::span<Unit* const> units, std::int64_t width) {
  std::vector<Row> rows;
  std::size_t k = 0;
  std::int64_t most_told = 0;
  bool whole_rows = false, logprobs = false;
  for (const Unit* unit : units) {
    const std::size_t own = unit->new_tokens() == 0 ? 1 : static_cast<std::size_t>(width);
    for (std::size_t beam = 0; beam < own; ++beam) rows.push_back({unit, beam});
    const std::size_t few = most_candidates(*unit->options);
    whole_rows = whole_rows || few == 0;
    k = std::max(k, few);
    logprobs = logprobs || unit->options->logprobs;
    most_told = std::max(most_told, unit->options->top_logprobs);
  }
  read(logits);
  // All tensor ranks come to the same end here, so that none waits for another.
  find_masses(rows.size(), width > 1 || logprobs);
  std::vector<std::vector<Candidate>> best, likely;
  if (most_told > 0) likely = likeliest(rows.size(), static_cast<std::size_t>(most_told));
  if (whole_rows) {
    gather_rows(rows.size());
  } else {
    best = candidates(rows, k);
  }
  std::vector<Choice> choices;
  if (!first()) return choices;
  for (std::size_t u = 0, i = 0; u < units.size(); ++u) {
    Unit& unit = *units[u];
    const std::size_t own = unit.new_tokens() == 0 ? 1 : static_cast<std::size_t>(width);
    if (unit.done) {  // it has not left yet
      const std::vector<std::int32_t> nothing(static_cast<std::size_t>(width), 0);
      choices.push_back({true, nothing, nothing});
    } else if (width > 1) {
      choices.push_back(advance(unit, i, std::span(best).subspan(i, own)));
    } else {
      const std::int64_t count = unit.options->top_logprobs;
      if (count > 0) unit.likeliest.push_back(told(i, likely[i], count));
      const std::size_t few = most_candidates(*unit.options);
      std::vector<Candidate> from;
      if (few > 0 && whole_rows) {
        select(adjusted(i, {&unit, 0}), 0, few, from);
        for (Candidate& each : from) each.raw = row(i)[static_cast<std::size_t>(each.token)];
      } else if (few > 0) {
        from = std::move(best[i]);
        from.resize(std::min(from.size(), few));
      }
      choices.push_back(draw_one(unit, i, few > 0 ? &from : nullptr));
    }
    i += own;
  }
  held_ = {};
  return choices;
}

}  // namespace tessera::generation
