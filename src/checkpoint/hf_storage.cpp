#include "checkpoint/hf_storage.hpp"

#include <cstring>
#include <unordered_map>

#include "checkpoint/slice_runs.hpp"
#include "tessera/checkpoint/sharded.hpp"

namespace tessera::checkpoint_detail {
namespace {

class Files final : public HfStorage {
 public:
  Files(const std::filesystem::path& dir, SymbolicLinks links) : reader_(dir, links) {}
  const std::vector<SafetensorsEntry>& entries() const override { return reader_.entries(); }
  const SafetensorsEntry* find(std::string_view name) const override { return reader_.find(name); }
  void read_slice(std::string_view name, const TensorSlice& slice, std::span<std::byte> out) const override {
    reader_.read_slice(name, slice, out);
  }
  bool in_memory() const override { return false; }
  void describe(HfSource& source) const override {
    source.has_index = reader_.has_index();
    source.index_metadata = reader_.index_metadata();
    for (const auto& entry : reader_.entries()) source.weight_map[entry.name] = reader_.file_of(entry.name);
    for (const auto& file : reader_.files()) source.file_metadata[file] = reader_.metadata_of(file);
  }

 private:
  ShardedReader reader_;
};

class Memory final : public HfStorage {
 public:
  explicit Memory(std::vector<TensorView> tensors) : tensors_(std::move(tensors)) {
    for (const TensorView& tensor : tensors_)
      entries_.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      const bool added = index_.emplace(entries_[i].name, i).second;
      TESSERA_CHECK(added, "the model has two tensors named '", entries_[i].name, "'");
    }
  }
  const std::vector<SafetensorsEntry>& entries() const override { return entries_; }
  const SafetensorsEntry* find(std::string_view name) const override {
    const auto it = index_.find(name);
    return it == index_.end() ? nullptr : &entries_[it->second];
  }
  void read_slice(std::string_view name, const TensorSlice& slice, std::span<std::byte> out) const override {
    const TensorView& tensor = tensors_[index_.at(name)];
    check_slice(tensor.name, tensor.shape, slice);
    for_each_run(TensorSlice::whole(tensor.shape), slice, slice, size_of(tensor.dtype),
                 [&](std::uint64_t from, std::uint64_t to, std::uint64_t bytes) {
                   std::memcpy(out.data() + to, tensor.data + from, bytes);
                 });
  }
  bool in_memory() const override { return true; }
  void describe(HfSource&) const override {}

 private:
  std::vector<TensorView> tensors_;
  std::vector<SafetensorsEntry> entries_;
  std::unordered_map<std::string_view, std::size_t> index_;  // keys are names in entries_
};

}  // namespace

std::unique_ptr<HfStorage> files_of(const std::filesystem::path& dir, SymbolicLinks links) {
  return std::make_unique<Files>(dir, links);
}
std::unique_ptr<HfStorage> memory_of(std::vector<TensorView> tensors) {
  return std::make_unique<Memory>(std::move(tensors));
}

}  // namespace tessera::checkpoint_detail
