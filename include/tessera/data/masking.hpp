#pragma once
/// Which tokens of a sample a masked language model has to guess: words and runs of words, drawn as Megatron
/// draws them.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tessera/data/numpy_random.hpp"

namespace tessera {

/// Ids that samples of sentences are put together with; -1 = the vocabulary has none.
struct SpecialTokens {
  std::int32_t cls = -1;
  std::int32_t sep = -1;
  std::int32_t mask = -1;
  std::int32_t pad = -1;
  std::int32_t bos = -1;  ///< what a decoder begins with
  std::int32_t eos = -1;
  std::vector<std::int32_t> sentinels{};  ///< T5's "<extra_id_0>" and so on
  /// Ids that go on with the word before them ("##ing" of WordPiece), rising.
  std::vector<std::int32_t> continuations{};

  friend bool operator==(const SpecialTokens&, const SpecialTokens&) = default;
};

struct MaskingOptions {
  double mask_prob = 0.15;     ///< share of a sample's tokens
  std::int64_t max_ngram = 3;  ///< words masked together, at most
  bool whole_words = true;     ///< all pieces of a word or none
  bool longer_ngrams = false;  ///< runs of n words come n times as often as of one, not 1/n times
  bool geometric = false;      ///< lengths of runs are geometric(0.2), cut at max_ngram, as SpanBERT's
};

/// Words of a sample: the positions of each, one word after the other; specials belong to none.
struct Words {
  std::vector<std::int32_t> positions{};
  std::vector<std::int32_t> begins{0};  ///< word w is positions [begins[w], begins[w + 1])

  std::int32_t count() const { return static_cast<std::int32_t>(begins.size()) - 1; }
  /// Positions of words [word, word + n), fewer at the end.
  std::span<const std::int32_t> run(std::int32_t word, std::int64_t n) const;
};

/// Words of `tokens`. `continues[id]`: whether the id goes on with the word before it, be a special token
/// between them or not; beyond its end none does.
Words find_words(std::span<const std::int32_t> tokens, const SpecialTokens& special,
                 const std::vector<bool>& continues, bool whole_words);

/// Calls `mask(run)` for runs of words that do not overlap, until `budget` positions are masked: a run that
/// would go beyond is shortened, one word that would is passed over. `mask` may draw from `random`.
/// Megatron's two shuffles of the words are drawn before and after.
void choose_runs(const Words& words, double budget, const MaskingOptions& options, NumpyRandom& random,
                 const std::function<void(std::span<const std::int32_t>)>& mask);

/// Megatron's number of tokens to mask in a sample of `length` tokens, specials included, made for
/// `target_length` without them: may be no whole number.
double mask_budget(std::int64_t length, std::int64_t target_length, double mask_prob);

}  // namespace tessera
