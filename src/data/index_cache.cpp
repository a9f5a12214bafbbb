#include <filesystem>
#include <limits>

#include "data/array_cache.hpp"
#include "data/file.hpp"
#include "data/index_check.hpp"

namespace tessera {
namespace {

/// Everything the indices depend on. The folder is left out: data that was moved keeps its cache.
CacheJson describe(const IndexedDataset& dataset, const GptIndexRequest& request, const std::string& split) {
  CacheJson d;
  d["class"] = "GPTDataset";
  d["dataset_path"] = std::filesystem::path(dataset.prefix()).filename().string();
  d["index_bytes"] = dataset.index_bytes();
  d["token_bytes"] = dataset.token_bytes();
  d["sequence_lengths"] = files::hex(dataset.lengths_hash());
  d["num_samples"] = request.num_samples ? CacheJson(*request.num_samples) : CacheJson(nullptr);
  d["index_split"] = split;
  d["random_seed"] = request.seed;
  d["sequence_length"] = request.seq_length;
  d["split_range"] = {request.begin, request.end};
  d["drop_last_partial_sequence"] = !request.keep_partial;
  return d;
}

/// Arrays of the shapes the plan predicts; a cache file of any other shape is not ours.
std::vector<CachedEntry> entries_of(const GptIndexRequest& request, const GptIndexPlan& plan) {
  const std::int64_t documents = plan.epochs * (request.end - request.begin);
  const bool wide_rows = documents > std::numeric_limits<std::int32_t>::max();
  const bool wide_order = plan.samples >= std::int64_t{std::numeric_limits<std::uint32_t>::max()} - 1;
  return {{"document_index",
           {DType::i32, {documents}},
           [&request](const IntArray& array, const std::string& path) {
             return check_document_index(array, request, path);
           }},
          {"sample_index",
           {wide_rows ? DType::i64 : DType::i32, {plan.samples + 1, 2}},
           [&request, documents](const IntArray& array, const std::string& path) {
             return check_sample_index(array, request, documents, path);
           }},
          {"shuffle_index",
           {wide_order ? DType::i64 : DType::u32, {plan.samples}},
           [samples = plan.samples](const IntArray& array, const std::string& path) {
             return check_shuffle_index(array, samples, path);
           }}};
}

}  // namespace

CachedGptIndices cached_gpt_indices(const IndexedDataset& dataset, const GptIndexRequest& request,
                                    const std::string& split, const std::string& folder) {
  CachedGptIndices result;
  const GptIndexPlan plan =
      plan_gpt_indices(count_tokens(dataset.lengths(), request.begin, request.end), request);
  if (folder.empty() || plan.tokens_per_epoch == 0) {
    result.indices = build_gpt_indices(dataset.lengths(), request);
    return result;
  }
  const ArrayCache cache{.folder = folder,
                         .kind = "GPTDataset",
                         .split = split,
                         .description = describe(dataset, request, split),
                         .on_progress = request.on_progress};
  CachedArrays found = cached_arrays(cache, entries_of(request, plan), [&] {
    GptIndices built = build_gpt_indices(dataset.lengths(), request);
    return std::vector{built.document_index, built.sample_index, built.shuffle_index};
  });
  result.indices = {found.arrays[0], found.arrays[1], found.arrays[2]};
  result.cache = found.cache;
  result.note = std::move(found.note);
  return result;
}

}  // namespace tessera
