#include "data/sentence_samples.hpp"

#include <algorithm>
#include <array>

#include "tessera/base/error.hpp"

namespace tessera {

SentenceRow read_row(const IndexedDataset& data, const CachedSentenceMap& map, std::int64_t index) {
  TESSERA_CHECK(index >= 0 && index < map.samples(), data.prefix(), ": sample ", index, " of ",
                map.samples());
  data.check_unchanged_at_times();
  std::array<std::int64_t, 3> row;
  map.rows.read(3 * index, row);
  const auto [begin, end, target_length] = row;
  SentenceRow out{.target_length = target_length};
  for (std::int64_t i = begin; i < end; ++i) out.sentences.push_back(data.sequence(i));
  return out;
}

std::vector<bool> continuation_flags(const SpecialTokens& special, std::int64_t ids) {
  std::vector<bool> flags;
  for (const std::int32_t id : special.continuations) {
    TESSERA_CHECK(id >= 0 && id < ids, "id ", id, " of a vocabulary of ", ids);
    flags.resize(std::max(flags.size(), static_cast<std::size_t>(id) + 1));
    flags[static_cast<std::size_t>(id)] = true;
  }
  return flags;
}

std::string map_folder(const IndexedDataset& data, const std::string& given, const char* kind) {
  return given.empty() ? data.prefix() + "/cache/" + kind + "_indices" : given;
}

void check_masking(const MaskingOptions& masking) {
  TESSERA_CHECK(masking.mask_prob > 0 && masking.mask_prob < 1, "mask_prob ", masking.mask_prob,
                " is not between 0 and 1");
  TESSERA_CHECK(masking.max_ngram >= 1 && masking.max_ngram <= 1024, "masking_max_ngram ", masking.max_ngram,
                " is not in [1, 1024]");
}

void fill_padded(std::span<std::int32_t> out, std::span<const std::int32_t> values, std::int32_t padding) {
  std::fill(std::ranges::copy(values, out.begin()).out, out.end(), padding);
}

}  // namespace tessera
