#include "tessera/data/dataset_tools.hpp"

#include <algorithm>
#include <filesystem>
#include <memory>

#include "tessera/base/error.hpp"
#include "tessera/data/indexed_writer.hpp"

namespace tessera {
namespace {

namespace fs = std::filesystem;

void check_target(const std::string& prefix, bool overwrite) {
  TESSERA_ENSURE(ConfigError, !prefix.empty(), "--output-prefix is not given");
  for (const char* suffix : {".idx", ".bin"}) {
    std::error_code error;
    TESSERA_ENSURE(ConfigError, overwrite || !fs::exists(prefix + suffix, error), prefix, suffix,
                   " is there already: choose another --output-prefix, or replace it with --overwrite");
  }
}

/// Neither --overwrite nor anything else makes a dataset out of itself.
void check_apart(const IndexedDataset& from, const std::string& prefix) {
  std::error_code error;
  TESSERA_ENSURE(ConfigError, !fs::equivalent(from.prefix() + ".bin", prefix + ".bin", error), prefix,
                 " is what is read: choose another --output-prefix");
}

void check_copied(const IndexedDataset& data) {
  TESSERA_ENSURE(ConfigError, !data.has_modes(), data.prefix(),
                 ": has a mode for each sequence (multimodal data), which Tessera does not write");
}

/// u32 is fairseq's alone.
DType written_dtype(const IndexedDataset& data) {
  return data.dtype() == DType::u32 ? DType::i32 : data.dtype();
}

void publish(IndexedDatasetWriter& writer, const std::string& prefix,
             const std::optional<DatasetRecord>& record) {
  fs::remove(dataset_record_path(prefix));  // never an old record beside new files
  writer.finish();
  if (record) write_dataset_record(prefix, *record);
}

void make_folder_of(const std::string& prefix) {
  const fs::path folder = fs::path(prefix).parent_path();
  std::error_code error;
  if (!folder.empty()) fs::create_directories(folder, error);
  TESSERA_ENSURE(IoError, !error, folder.string(), ": cannot be created: ", error.message());
}

/// What datasets that become one must agree on. The record they share.
std::optional<DatasetRecord> check_alike(std::span<const std::unique_ptr<IndexedDataset>> parts) {
  const IndexedDataset& first = *parts.front();
  std::vector<std::string> prefixes;
  std::optional<bool> sentences;
  std::size_t records = 0;
  for (const auto& part : parts) {
    check_copied(*part);
    prefixes.push_back(part->prefix());
    TESSERA_ENSURE(ConfigError, written_dtype(*part) == written_dtype(first), part->prefix(),
                   ": holds tokens as ", part->dtype(), ", and ", first.prefix(), " as ", first.dtype(),
                   ". Make all parts with one tokenizer");
    const auto record = read_dataset_record(part->prefix());
    if (!record) continue;
    ++records;
    TESSERA_ENSURE(ConfigError, sentences.value_or(record->split_sentences) == record->split_sentences,
                   part->prefix(), ": its sequences are ",
                   record->split_sentences ? "sentences" : "documents",
                   ", and those of a part before it are not");
    sentences = record->split_sentences;
  }
  // Where one of them says nothing of itself, nothing holds for the whole.
  auto shared = shared_record(prefixes);
  return records == parts.size() ? shared : std::nullopt;
}

std::int64_t tokens_of(std::span<const std::int32_t> lengths, std::int64_t begin, std::int64_t end) {
  std::int64_t tokens = 0;
  for (std::int64_t i = begin; i < end; ++i) tokens += lengths[static_cast<std::size_t>(i)];
  return tokens;
}

}  // namespace

DatasetInfo describe_dataset(const std::string& prefix) {
  const IndexedDataset data(prefix);
  DatasetInfo info{.format = data.format(),
                   .dtype = data.dtype(),
                   .documents = data.documents(),
                   .sequences = data.sequences(),
                   .tokens = data.tokens(),
                   .index_bytes = data.index_bytes(),
                   .token_bytes = data.token_bytes(),
                   .has_modes = data.has_modes(),
                   .record = read_dataset_record(data.prefix())};
  const auto lengths = data.lengths();
  const auto begins = data.document_begins(0, data.documents() + 1);
  std::vector<std::int64_t> tokens;
  for (std::size_t d = 0; d + 1 < begins.size(); ++d)
    tokens.push_back(tokens_of(lengths, begins[d], begins[d + 1]));
  if (tokens.empty()) return info;
  info.empty_documents = std::ranges::count(tokens, 0);
  std::ranges::sort(tokens);
  info.shortest = tokens.front();
  info.median = tokens[tokens.size() / 2];
  info.longest = tokens.back();
  return info;
}

void upgrade_dataset(const std::string& from, const DatasetTarget& target) {
  const IndexedDataset data(from);
  TESSERA_ENSURE(ConfigError, data.format() == IndexFormat::tntidx, data.prefix(),
                 ".idx is of today's layout (MMIDIDX): there is nothing to upgrade");
  check_target(target.prefix, target.overwrite);
  check_apart(data, target.prefix);
  make_folder_of(target.prefix);
  IndexedDatasetWriter writer(target.prefix, written_dtype(data));
  writer.append(data);
  publish(writer, target.prefix, read_dataset_record(data.prefix()));
}

std::vector<std::string> datasets_in(std::span<const std::string> names) {
  std::vector<std::string> prefixes;
  for (const std::string& name : names) {
    std::error_code error;
    if (!fs::is_directory(name, error)) {
      prefixes.push_back(name);
      continue;
    }
    std::vector<std::string> found;
    for (const auto& entry : fs::directory_iterator(name, error)) {
      if (entry.path().extension() == ".idx") found.push_back(fs::path(entry.path()).replace_extension());
    }
    TESSERA_ENSURE(DataError, !error && !found.empty(), name, ": the folder holds no .idx",
                   error ? ": " + error.message() : "");
    std::ranges::sort(found);
    prefixes.insert(prefixes.end(), found.begin(), found.end());
  }
  return prefixes;
}

void merge_datasets(std::span<const std::string> parts, const DatasetTarget& target) {
  TESSERA_ENSURE(ConfigError, !parts.empty(), "no dataset is named");
  check_target(target.prefix, target.overwrite);
  std::vector<std::unique_ptr<IndexedDataset>> opened;
  for (const std::string& part : parts) {
    opened.push_back(std::make_unique<IndexedDataset>(part));
    check_apart(*opened.back(), target.prefix);
  }
  const auto record = check_alike(opened);
  make_folder_of(target.prefix);
  IndexedDatasetWriter writer(target.prefix, written_dtype(*opened.front()));
  for (const auto& part : opened) writer.append(*part);
  publish(writer, target.prefix, record);
}

std::vector<DatasetPart> parts_of_split(const IndexedDataset& data, const std::string& split) {
  std::vector<DatasetPart> parts;
  const auto ranges = split_ranges(parse_split(split), data.documents());
  for (const Split which : {Split::train, Split::valid, Split::test}) {
    if (const auto& range = ranges[static_cast<std::size_t>(which)])
      parts.push_back({std::string("_") + name_of(which), *range});
  }
  return parts;
}

std::vector<DatasetPart> parts_of_count(const IndexedDataset& data, std::int64_t count) {
  TESSERA_ENSURE(ConfigError, count >= 1 && count <= data.documents(), "--parts ", count, ": ", data.prefix(),
                 " has ", data.documents(), " documents");
  const auto lengths = data.lengths();
  const auto begins = data.document_begins(0, data.documents() + 1);
  std::vector<DatasetPart> parts;
  std::int64_t document = 0, tokens = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    DatasetPart part{detail::concat("_", i), {document, document}};
    const auto due = static_cast<std::int64_t>(static_cast<double>(data.tokens()) *
                                               static_cast<double>(i + 1) / static_cast<double>(count));
    const std::int64_t last = data.documents() - (count - 1 - i);  // one is left for each part that follows
    while (document < last && (tokens < due || document == part.documents.begin || i + 1 == count)) {
      const auto at = static_cast<std::size_t>(document++);
      tokens += tokens_of(lengths, begins[at], begins[at + 1]);
    }
    part.documents.end = document;
    parts.push_back(part);
  }
  return parts;
}

std::vector<std::string> split_dataset(const IndexedDataset& data, std::span<const DatasetPart> parts,
                                       const DatasetTarget& target) {
  TESSERA_ENSURE(ConfigError, !target.prefix.empty(), "--output-prefix is not given");
  check_copied(data);
  std::vector<std::string> prefixes;
  for (const DatasetPart& part : parts) {
    prefixes.push_back(target.prefix + part.suffix);
    check_target(prefixes.back(), target.overwrite);
    check_apart(data, prefixes.back());
  }
  const auto record = read_dataset_record(data.prefix());
  make_folder_of(target.prefix);
  std::vector<std::unique_ptr<IndexedDatasetWriter>> writers;  // all are whole before one has its name
  for (std::size_t i = 0; i < parts.size(); ++i) {
    writers.push_back(std::make_unique<IndexedDatasetWriter>(prefixes[i], written_dtype(data)));
    writers.back()->append_documents(data, parts[i].documents);
  }
  for (std::size_t i = 0; i < parts.size(); ++i) publish(*writers[i], prefixes[i], record);
  return prefixes;
}

}  // namespace tessera
