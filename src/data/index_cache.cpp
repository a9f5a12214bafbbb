#include <array>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <system_error>

#include "data/file.hpp"
#include "data/npy.hpp"
#include "tessera/base/hash.hpp"
#include "tessera/data/gpt_indices.hpp"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kNames[3] = {"document_index", "sample_index", "shuffle_index"};

/// Everything the indices depend on. The folder is left out: data that was moved keeps its cache.
Json describe(const IndexedDataset& dataset, const GptIndexRequest& request, const std::string& split) {
  Json d;
  d["class"] = "GPTDataset";
  d["dataset_path"] = std::filesystem::path(dataset.prefix()).filename().string();
  d["index_bytes"] = dataset.index_bytes();
  d["token_bytes"] = dataset.token_bytes();
  d["sequence_lengths"] = files::hex(dataset.lengths_hash());
  d["num_samples"] = request.num_samples ? Json(*request.num_samples) : Json(nullptr);
  d["index_split"] = split;
  d["random_seed"] = request.seed;
  d["sequence_length"] = request.seq_length;
  d["split_range"] = {request.begin, request.end};
  d["drop_last_partial_sequence"] = !request.keep_partial;
  return d;
}

/// File names need not be UTF-8.
std::string dump(const Json& json) { return json.dump(4, ' ', false, Json::error_handler_t::replace); }

std::uint64_t checksum(const IntArray& array) { return content_hash(array.bytes()); }

/// The shapes the plan predicts; a cache file of any other shape is not ours.
std::array<npy::Layout, 3> expected_layouts(const GptIndexRequest& request, const GptIndexPlan& plan) {
  const std::int64_t documents = plan.epochs * (request.end - request.begin);
  const bool wide_rows = documents > std::numeric_limits<std::int32_t>::max();
  const bool wide_order = plan.samples >= std::int64_t{std::numeric_limits<std::uint32_t>::max()} - 1;
  return {npy::Layout{DType::i32, {documents}},
          npy::Layout{wide_rows ? DType::i64 : DType::i32, {plan.samples + 1, 2}},
          npy::Layout{wide_order ? DType::i64 : DType::u32, {plan.samples}}};
}

GptIndices load(const std::string& base, const Json& description, const std::array<npy::Layout, 3>& layouts,
                const std::function<void()>& on_progress) {
  const files::InputFile file(base + "description.txt", false);
  TESSERA_ENSURE(DataError, file.size() < (1 << 20), file.path(), ": too long");
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  const Json stored = Json::parse(text, nullptr, false);
  TESSERA_ENSURE(DataError, stored.is_object() && stored.value("description", Json()) == description,
                 file.path(), ": describes other indices");
  IntArray arrays[3];
  for (std::size_t i = 0; i < 3; ++i) {
    const std::string path = base + kNames[i] + ".npy";
    arrays[i] = npy::load(path, layouts[i]);
    const Json sums = stored.value("checksums", Json());
    TESSERA_ENSURE(DataError,
                   sums.is_object() && sums.value(kNames[i], Json()) == Json(files::hex(checksum(arrays[i]))),
                   path, ": its checksum does not match");
    if (on_progress) on_progress();
  }
  return {arrays[0], arrays[1], arrays[2]};
}

void save(const std::string& folder, const std::string& base, const Json& description,
          const GptIndices& indices, const std::array<npy::Layout, 3>& layouts,
          const std::function<void()>& on_progress) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  TESSERA_ENSURE(IoError, !error, folder, ": cannot be created: ", error.message());
  const IntArray* arrays[3] = {&indices.document_index, &indices.sample_index, &indices.shuffle_index};
  Json stored;
  stored["description"] = description;
  for (std::size_t i = 0; i < 3; ++i) {
    npy::save(base + kNames[i] + ".npy", *arrays[i], layouts[i]);
    stored["checksums"][kNames[i]] = files::hex(checksum(*arrays[i]));
    if (on_progress) on_progress();
  }
  files::OutputFile file(base + "description.txt");
  file.write(dump(stored));
  file.publish(false);  // checksums find what a power cut leaves half written
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
  const Json description = describe(dataset, request, split);
  const std::string text = dump(description);
  const auto bytes = std::as_bytes(std::span(text));
  const std::string hash = files::hex(content_hash(bytes, 1)) + files::hex(content_hash(bytes, 2));
  const std::string base = folder + "/" + hash + "-GPTDataset-" + split + "-";
  const auto layouts = expected_layouts(request, plan);
  try {
    result.indices = load(base, description, layouts, request.on_progress);
    result.cache = CacheUse::loaded;
    return result;
  } catch (const Error& error) {
    result.note = error.what();
  }
  result.indices = build_gpt_indices(dataset.lengths(), request);
  try {
    save(folder, base, description, result.indices, layouts, request.on_progress);
    result.cache = CacheUse::saved;
  } catch (const IoError& error) {
    result.note = error.what();
    result.cache = CacheUse::unsaved;
  }
  return result;
}

}  // namespace tessera
