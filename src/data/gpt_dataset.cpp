#include <algorithm>
#include <array>

#include "tessera/data/batch.hpp"
#include "tessera/data/dataset.hpp"

namespace tessera {
namespace {

/// Megatron's rules at ends of documents: the end itself still belongs to its document.
void apply_document_ends(const GptDatasetOptions& options, const SampleView& out) {
  std::int32_t begin = 0;
  std::int32_t document = 0;
  for (std::size_t i = 0; i < out.tokens.size(); ++i) {
    const auto position = static_cast<std::int32_t>(i);
    if (!out.position_ids.empty()) out.position_ids[i] = position - begin;
    if (!out.document_ids.empty()) out.document_ids[i] = document;
    if (options.end_of_document < 0 || out.tokens[i] != options.end_of_document) continue;
    if (options.eod_mask_loss) out.labels[i] = kIgnoredLabel;
    begin = position + 1;
    ++document;
  }
}

}  // namespace

GptDataset::GptDataset(std::shared_ptr<const IndexedDataset> data, ElementRange range,
                       const GptDatasetOptions& options)
    : data_(std::move(data)),
      options_(options),
      keep_partial_(options.split == Split::valid && !options.drop_last_partial) {
  const bool needs_end = options.reset_position_ids || options.reset_attention_mask || options.eod_mask_loss;
  TESSERA_CHECK(!needs_end || options.end_of_document >= 0,
                "reset_position_ids, reset_attention_mask and eod_mask_loss need the end-of-document id");
  GptIndexRequest request;
  request.begin = range.begin;
  request.end = range.end;
  request.seq_length = options.seq_length;
  request.num_samples = options.num_samples;
  request.seed = options.seed;
  request.on_progress = options.on_progress;
  request.keep_partial = keep_partial_;
  std::string folder;
  if (options.use_cache) {
    folder =
        options.cache_folder.empty() ? data_->prefix() + "/cache/GPTDataset_indices" : options.cache_folder;
  }
  cached_ = cached_gpt_indices(*data_, request, name_of(options.split), folder);
}

/// Tokens from row `row` up to and with the first token of the next; returns how many there were.
std::int64_t GptDataset::gather(std::int64_t row, std::span<std::int32_t> out) const {
  const GptIndices& indices = cached_.indices;
  std::array<std::int64_t, 4> places;  // two rows: position in the document index, offset
  indices.sample_index.read(2 * row, places);
  const auto [first, first_offset, last, last_offset] = places;
  TESSERA_ENSURE(DataError, first >= 0 && first <= last && last < indices.document_index.size(),
                 data_->prefix(), ": sample row ", row, " spans documents ", first, " to ", last, " of ",
                 indices.document_index.size());
  std::int64_t offset = first_offset;
  std::int64_t done = 0;
  for (std::int64_t d = first; d <= last; ++d, offset = 0) {
    const std::int64_t sequence = indices.document_index[d];
    const std::int64_t end = d == last ? last_offset + 1 : std::int64_t{data_->length(sequence)};
    const std::int64_t count = std::max<std::int64_t>(0, end - offset);
    TESSERA_ENSURE(DataError, count <= static_cast<std::int64_t>(out.size()) - done, data_->prefix(),
                   ": sample row ", row, " is longer than ", out.size(), " tokens");
    data_->read(sequence, offset,
                out.subspan(static_cast<std::size_t>(done), static_cast<std::size_t>(count)));
    done += count;
  }
  const bool whole = done == static_cast<std::int64_t>(out.size());
  TESSERA_ENSURE(DataError, whole || (keep_partial_ && row + 1 == indices.samples()), data_->prefix(),
                 ": sample row ", row, " has ", done, " tokens, not ", out.size(),
                 ". Its cached indices do not belong to the data: remove them, and they are built anew");
  return done;
}

void GptDataset::fetch(std::int64_t index, const SampleView& out) const {
  TESSERA_CHECK(index >= 0 && index < size(), data_->prefix(), ": sample ", index, " of ", size());
  const auto s = static_cast<std::size_t>(options_.seq_length);
  check_view(out, options_.seq_length, fields());
  data_->check_unchanged_at_times();
  std::vector<std::int32_t> text(s + 1);
  const auto have = static_cast<std::size_t>(gather(cached_.indices.shuffle_index[index], text));
  for (std::size_t i = 0; i < s; ++i) {
    out.tokens[i] = i < have ? text[i] : 0;
    out.labels[i] = i + 1 < have ? text[i + 1] : kIgnoredLabel;
  }
  apply_document_ends(options_, out);
}

namespace {

class GptMaker final : public SampleMaker {
 public:
  explicit GptMaker(const GptDatasetOptions& options) : options_(options) {}
  const char* unit() const override { return "sequences"; }
  std::int64_t units(const IndexedDataset& data) const override { return data.sequences(); }
  ElementRange sequences(const IndexedDataset&, ElementRange units) const override { return units; }
  Made make(std::shared_ptr<const IndexedDataset> data, ElementRange units, Split split,
            std::optional<std::int64_t> num_samples) const override {
    GptDatasetOptions options = options_;
    options.split = split;
    options.num_samples = num_samples;
    auto made = std::make_shared<const GptDataset>(std::move(data), units, options);
    return {made, made->cache_note()};
  }

 private:
  const GptDatasetOptions& options_;
};

}  // namespace

GptData build_gpt_data(const GptDataOptions& options) {
  return build_splits(options, GptMaker(options.dataset));
}

}  // namespace tessera
