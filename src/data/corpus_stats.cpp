#include "tessera/data/corpus_stats.hpp"

#include <cmath>
#include <vector>

namespace tessera {
namespace {

/// Calls visit(previous or -1, token) for every token of sequences [begin, end); returns their number.
template <typename Visit>
std::int64_t each_token(const IndexedDataset& data, ElementRange range, std::int64_t vocab_size,
                        Visit&& visit) {
  std::int64_t previous = -1;
  std::int64_t count = 0;
  for (std::int64_t i = range.begin; i < range.end; ++i) {
    for (const std::int32_t token : data.sequence(i)) {
      TESSERA_ENSURE(DataError, token < vocab_size, data.prefix(), ".bin: sequence ", i, ": token id ", token,
                     " is not in the vocabulary of ", vocab_size);
      visit(previous, token);
      previous = token;
      ++count;
    }
  }
  return count;
}

}  // namespace

CorpusBaselines corpus_baselines(const IndexedDataset& data, ElementRange train, ElementRange valid,
                                 std::int64_t vocab_size) {
  TESSERA_CHECK(vocab_size > 0 && vocab_size <= 8192, "vocab_size = ", vocab_size, " is not in 1 to 8192");
  const auto v = static_cast<std::size_t>(vocab_size);
  std::vector<double> single(v, 1.0);  // add-one smoothing
  std::vector<double> before(v, static_cast<double>(vocab_size));
  std::vector<double> pair(v * v, 1.0);
  CorpusBaselines out;
  out.train_tokens = each_token(data, train, vocab_size, [&](std::int64_t previous, std::int64_t token) {
    single[static_cast<std::size_t>(token)] += 1;
    if (previous < 0) return;
    before[static_cast<std::size_t>(previous)] += 1;
    pair[static_cast<std::size_t>(previous) * v + static_cast<std::size_t>(token)] += 1;
  });
  const double total = static_cast<double>(out.train_tokens + vocab_size);
  double unigram = 0;
  double bigram = 0;
  out.valid_tokens = each_token(data, valid, vocab_size, [&](std::int64_t previous, std::int64_t token) {
    unigram -= std::log(single[static_cast<std::size_t>(token)] / total);
    if (previous < 0) return;
    const auto row = static_cast<std::size_t>(previous);
    bigram -= std::log(pair[row * v + static_cast<std::size_t>(token)] / before[row]);
  });
  TESSERA_ENSURE(DataError, out.train_tokens > 1 && out.valid_tokens > 1, data.prefix(), ": ",
                 out.train_tokens, " training and ", out.valid_tokens,
                 " validation tokens; the baselines need two of each");
  out.unigram = unigram / static_cast<double>(out.valid_tokens);
  out.bigram = bigram / static_cast<double>(out.valid_tokens - 1);
  return out;
}

}  // namespace tessera
