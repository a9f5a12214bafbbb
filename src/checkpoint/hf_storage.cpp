#include "checkpoint/hf_storage.hpp"

#include <cstring>
#include <map>
#include <set>
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

/// Tensors that are rows of others.
class Parts final : public HfStorage {
 public:
  struct Part {
    std::string name;  ///< of the tensor that it is in
    std::int64_t member = -1, row = 0;
  };
  Parts(std::unique_ptr<HfStorage> whole, std::map<std::string, Part, std::less<>> parts,
        const std::map<std::string, Shape>& shapes)
      : whole_(std::move(whole)), parts_(std::move(parts)) {
    std::set<std::string_view> divided;
    for (const auto& [name, part] : parts_) divided.insert(part.name);
    for (const SafetensorsEntry& entry : whole_->entries()) {
      if (!divided.contains(entry.name)) entries_.push_back(entry);
    }
    for (const auto& [name, part] : parts_) {
      SafetensorsEntry entry = *whole_->find(part.name);
      entry.name = name;
      entry.shape = shapes.at(name);
      entries_.push_back(std::move(entry));
    }
    for (std::size_t i = 0; i < entries_.size(); ++i) index_.emplace(entries_[i].name, i);
  }
  const std::vector<SafetensorsEntry>& entries() const override { return entries_; }
  const SafetensorsEntry* find(std::string_view name) const override {
    const auto it = index_.find(name);
    return it == index_.end() ? nullptr : &entries_[it->second];
  }
  void read_slice(std::string_view name, const TensorSlice& slice, std::span<std::byte> out) const override {
    const auto it = parts_.find(name);
    if (it == parts_.end()) return whole_->read_slice(name, slice, out);
    const auto& [whole, member, row] = it->second;
    if (member < 0) return whole_->read_slice(whole, slice, out);
    whole_->read_slice(
        whole, {{member, row + slice.offset[0], slice.offset[1]}, {1, slice.shape[0], slice.shape[1]}}, out);
  }
  bool in_memory() const override { return whole_->in_memory(); }
  void describe(HfSource& source) const override {
    whole_->describe(source);
    std::map<std::string, std::string> files = source.weight_map;
    for (const auto& [name, part] : parts_) source.weight_map.erase(part.name);
    for (const auto& [name, part] : parts_) {
      if (files.contains(part.name)) source.weight_map[name] = files.at(part.name);
    }
  }

 private:
  std::unique_ptr<HfStorage> whole_;
  std::map<std::string, Part, std::less<>> parts_;
  std::vector<SafetensorsEntry> entries_;
  std::unordered_map<std::string_view, std::size_t> index_;  // keys are names in entries_
};

}  // namespace

std::unique_ptr<HfStorage> as_files(std::unique_ptr<HfStorage> storage, const std::vector<HfMapping>& files,
                                    const std::vector<HfMapping>& modules) {
  std::map<std::string, Parts::Part, std::less<>> parts;
  std::map<std::string, Shape> shapes;
  for (std::size_t i = 0; i < files.size(); ++i) {
    const HfPart& module = modules[i].parts.front();
    const SafetensorsEntry* const there = storage->find(module.name);
    if (module.name == files[i].parts.front().name || there == nullptr || !(there->shape == module.shape))
      continue;
    std::int64_t row = 0;
    for (const HfPart& part : files[i].parts) {
      parts[part.name] = {module.name, module.member, row};
      shapes[part.name] = part.shape;
      row += part.shape[0];
    }
  }
  if (parts.empty()) return storage;
  return std::make_unique<Parts>(std::move(storage), std::move(parts), shapes);
}

std::unique_ptr<HfStorage> files_of(const std::filesystem::path& dir, SymbolicLinks links) {
  return std::make_unique<Files>(dir, links);
}
std::unique_ptr<HfStorage> memory_of(std::vector<TensorView> tensors) {
  return std::make_unique<Memory>(std::move(tensors));
}

}  // namespace tessera::checkpoint_detail
