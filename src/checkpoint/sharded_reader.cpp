#include <deque>
#include <filesystem>

#include "checkpoint/file_io.hpp"
#include "checkpoint/weight_index.hpp"
#include "tessera/checkpoint/sharded.hpp"

namespace tessera {
namespace {

using namespace checkpoint_detail;
namespace fs = std::filesystem;

constexpr std::uint64_t kMaxIndexBytes = 100'000'000;
constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

}  // namespace

struct ShardedReader::Impl {
  struct Place {
    std::size_t file;
    std::size_t entry;
  };
  fs::path dir;
  SymbolicLinks links;
  std::vector<std::string> names;
  std::vector<SafetensorsReader> files;
  std::vector<SafetensorsEntry> entries;
  std::unordered_map<std::string_view, Place> index;
  std::string index_metadata;
  bool has_index = false;

  void open(const std::string& name) {
    names.push_back(name);
    files.emplace_back(dir / name, links);
  }

  void open_indexed() {
    const fs::path path = dir / kIndex;
    WeightIndex found = parse_weight_index(read_text(path, kMaxIndexBytes, links), path.string());
    index_metadata = std::move(found.metadata);
    has_index = true;
    std::map<std::string, std::size_t> wanted;  // file → number of tensors mapped to it
    for (const auto& [tensor, file] : found.files) ++wanted[file];
    for (const auto& [file, count] : wanted) {
      open(file);
      check_against(found, count);
    }
  }

  /// The file just opened holds exactly the tensors that the index places in it.
  void check_against(const WeightIndex& map, std::size_t count) {
    const SafetensorsReader& file = files.back();
    for (const auto& entry : file.entries()) {
      const auto mapped = map.files.find(entry.name);
      if (mapped == map.files.end() || mapped->second != names.back())
        bad_file(file.path(), "tensor '" + entry.name + "'", "the index does not place it in this file",
                 "Index and weight files do not belong together; save or download the folder again.");
    }
    if (file.entries().size() == count) return;
    for (const auto& [tensor, name] : map.files) {
      if (name == names.back()) file.at(tensor);
    }
  }
};

ShardedReader::ShardedReader(const fs::path& dir, SymbolicLinks links) : impl_(std::make_unique<Impl>()) {
  Impl& self = *impl_;
  self.dir = dir;
  self.links = links;
  std::error_code error;
  if (fs::exists(dir / kSingle, error)) {
    self.open(kSingle);
  } else if (fs::exists(dir / kIndex, error)) {
    self.open_indexed();
  } else {
    bad_file(dir, "", detail::concat("has neither ", kSingle, " nor ", kIndex),
             "Weights in other formats (pytorch_model.bin) are not read: save the model with "
             "save_pretrained(safe_serialization=True) first.");
  }
  for (std::size_t i = 0; i < self.files.size(); ++i) {
    const auto& entries = self.files[i].entries();
    for (std::size_t j = 0; j < entries.size(); ++j) {
      self.entries.push_back(entries[j]);
      self.index[entries[j].name] = {i, j};
    }
  }
}

ShardedReader::~ShardedReader() = default;
ShardedReader::ShardedReader(ShardedReader&&) noexcept = default;
ShardedReader& ShardedReader::operator=(ShardedReader&&) noexcept = default;

const fs::path& ShardedReader::dir() const { return impl_->dir; }
const std::vector<SafetensorsEntry>& ShardedReader::entries() const { return impl_->entries; }
const std::string& ShardedReader::index_metadata() const { return impl_->index_metadata; }
bool ShardedReader::has_index() const { return impl_->has_index; }
std::vector<std::string> ShardedReader::files() const { return impl_->names; }

const SafetensorsEntry* ShardedReader::find(std::string_view name) const {
  const auto it = impl_->index.find(name);
  return it == impl_->index.end() ? nullptr : &impl_->files[it->second.file].entries()[it->second.entry];
}

const std::string& ShardedReader::file_of(std::string_view name) const {
  const auto it = impl_->index.find(name);
  if (it == impl_->index.end())
    bad_file(impl_->dir, "tensor '" + std::string(name) + "'", "is in none of the weight files",
             "Check that the folder belongs to this model.");
  return impl_->names[it->second.file];
}

const std::map<std::string, std::string>& ShardedReader::metadata_of(const std::string& file) const {
  for (std::size_t i = 0; i < impl_->names.size(); ++i) {
    if (impl_->names[i] == file) return impl_->files[i].metadata();
  }
  TESSERA_CHECK(false, file, " is not one of the weight files of ", impl_->dir.string());
}

void ShardedReader::read(std::string_view name, std::span<std::byte> out) const {
  file_of(name);
  impl_->files[impl_->index.at(name).file].read(name, out);
}

void ShardedReader::read_slice(std::string_view name, const TensorSlice& slice,
                               std::span<std::byte> out) const {
  file_of(name);
  impl_->files[impl_->index.at(name).file].read_slice(name, slice, out);
}

}  // namespace tessera
