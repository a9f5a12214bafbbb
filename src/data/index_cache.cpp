#include <array>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <system_error>

#include "data/file.hpp"
#include "data/index_check.hpp"
#include "data/json_depth.hpp"
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

std::uint64_t checksum(const IntArray& array) {
  ContentHash hash;
  array.for_each_piece([&](std::span<const std::byte> piece) { hash.add(piece); });
  return hash.value();
}

/// The shapes the plan predicts; a cache file of any other shape is not ours.
std::array<npy::Layout, 3> expected_layouts(const GptIndexRequest& request, const GptIndexPlan& plan) {
  const std::int64_t documents = plan.epochs * (request.end - request.begin);
  const bool wide_rows = documents > std::numeric_limits<std::int32_t>::max();
  const bool wide_order = plan.samples >= std::int64_t{std::numeric_limits<std::uint32_t>::max()} - 1;
  return {npy::Layout{DType::i32, {documents}},
          npy::Layout{wide_rows ? DType::i64 : DType::i32, {plan.samples + 1, 2}},
          npy::Layout{wide_order ? DType::i64 : DType::u32, {plan.samples}}};
}

std::string read_description(const std::string& path) {
  const files::InputFile file(path, files::Keep::nothing);
  TESSERA_ENSURE(DataError, file.size() < (1 << 20), path, ": too long");
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  refuse_deep_json(text, path);
  return text;
}

GptIndices load(const std::string& base, const Json& description, const GptIndexRequest& request,
                const std::array<npy::Layout, 3>& layouts) {
  const std::string path = base + "description.txt";
  const Json stored = Json::parse(read_description(path), nullptr, false);
  TESSERA_ENSURE(DataError, stored.is_object() && stored.value("description", Json()) == description, path,
                 ": describes other indices");
  const Json sums = stored.value("checksums", Json());
  TESSERA_ENSURE(DataError, sums.is_object(), path, ": has no checksums");
  const std::string paths[3] = {base + kNames[0] + ".npy", base + kNames[1] + ".npy",
                                base + kNames[2] + ".npy"};
  const GptIndices indices{npy::load(paths[0], layouts[0]), npy::load(paths[1], layouts[1]),
                           npy::load(paths[2], layouts[2])};
  const auto check = [&](std::size_t i, std::uint64_t found) {
    TESSERA_ENSURE(DataError, sums.value(kNames[i], Json()) == Json(files::hex(found)), paths[i],
                   ": its checksum does not match");
    if (request.on_progress) request.on_progress();
  };
  check(0, check_document_index(indices.document_index, request, paths[0]));
  check(1, check_sample_index(indices.sample_index, request, indices.document_index.size(), paths[1]));
  check(2, check_shuffle_index(indices.shuffle_index, indices.samples(), paths[2]));
  return indices;
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
  std::error_code unreadable;
  if (std::filesystem::exists(base + "description.txt", unreadable)) {
    try {
      result.indices = load(base, description, request, layouts);
      result.cache = CacheUse::loaded;
      return result;
    } catch (const Error& error) {
      result.note = detail::concat(error.what(), ". The cached indices are not used; they are built anew");
    }
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
