#include "checkpoint/parts_storage.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <unordered_map>

#include "checkpoint/slice_runs.hpp"

namespace tessera::checkpoint_detail {
namespace {

namespace fs = std::filesystem;

/// What torch.compile, FSDP and activation checkpointing put between a module's name and its parameters'.
constexpr std::array kWrappers = {"_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."};
/// What stands beside a model's weights where these have no prefix of their own.
constexpr std::array kOthers = {"optimizer", "optimizers",  "optim",      "lr_scheduler", "lr_schedulers",
                                "scheduler", "train_state", "dataloader", "rng_state",    "extra_state"};

std::string unwrapped(std::string name) {
  for (const std::string wrapper : kWrappers) {
    for (std::size_t at = name.find(wrapper); at != std::string::npos; at = name.find(wrapper))
      name.erase(at, wrapper.size());
  }
  return name;
}

/// What stands before one of the embedding's names, the shortest there is.
std::optional<std::string> prefix_of(const std::vector<PartedTensor>& tensors, const HfNames& names) {
  std::vector<const char*> embeddings = {names.embedding};
  embeddings.insert(embeddings.end(), names.embedding_copies.begin(), names.embedding_copies.end());
  std::optional<std::string> found;
  for (const char* embedding : embeddings) {
    const std::string bare = std::string(embedding) + ".weight", full = names.prefix + bare;
    for (const PartedTensor& tensor : tensors) {
      const std::string& ending = tensor.name.ends_with(full) ? full : bare;
      if (!tensor.name.ends_with(ending)) continue;
      const std::string prefix = tensor.name.substr(0, tensor.name.size() - ending.size());
      if (!prefix.empty() && prefix.back() != '.') continue;
      if (!found || prefix.size() < found->size()) found = prefix;
    }
    if (found) return found;
  }
  return found;
}

bool is_other(std::string_view name) {
  const std::string_view first = name.substr(0, name.find('.'));
  return std::find(kOthers.begin(), kOthers.end(), first) != kOthers.end();
}

void check_parts(const PartedTensor& tensor, const fs::path& origin) {
  const auto fail = [&](const std::string& reason) {
    bad_file(origin, "tensor '" + tensor.name + "'", reason,
             "Check that all files of the checkpoint are there.");
  };
  std::int64_t elements = 0;
  for (std::size_t i = 0; i < tensor.parts.size(); ++i) {
    const TensorPart& part = tensor.parts[i];
    const std::optional<TensorSlice> inside = intersect(part.box, TensorSlice::whole(tensor.shape));
    if (part.count > 0 && !(inside == part.box)) fail("a part of it lies outside of it");
    elements += part.count;
    for (std::size_t j = 0; j < i; ++j) {
      const TensorPart& other = tensor.parts[j];
      const bool apart = part.first + part.count <= other.first || other.first + other.count <= part.first;
      if (part.count > 0 && other.count > 0 &&
          (part.box == other.box ? !apart : intersect(part.box, other.box).has_value()))
        fail("two parts of it overlap");
    }
  }
  if (elements != tensor.shape.numel())
    fail(detail::concat("its parts have ", elements, " elements, its shape ", tensor.shape, " has ",
                        tensor.shape.numel()));
}

class Parts final : public HfStorage {
 public:
  Parts(std::vector<PartedTensor> tensors, const fs::path& origin) : tensors_(std::move(tensors)) {
    for (const PartedTensor& tensor : tensors_) {
      check_parts(tensor, origin);
      entries_.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
    }
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      if (!index_.emplace(entries_[i].name, i).second)
        bad_file(origin, "tensor '" + entries_[i].name + "'", "is there twice",
                 "Check that the folder holds one checkpoint of one model.");
    }
  }
  const std::vector<SafetensorsEntry>& entries() const override { return entries_; }
  const SafetensorsEntry* find(std::string_view name) const override {
    const auto it = index_.find(name);
    return it == index_.end() ? nullptr : &entries_[it->second];
  }
  void read_slice(std::string_view name, const TensorSlice& slice, std::span<std::byte> out) const override {
    const PartedTensor& tensor = tensors_[index_.at(name)];
    check_slice(tensor.name, tensor.shape, slice);
    const std::size_t element = size_of(tensor.dtype);
    for (const TensorPart& part : tensor.parts) {
      const std::optional<TensorSlice> wanted = intersect(part.box, slice);
      if (!wanted || part.count == 0) continue;
      const std::uint64_t begin = static_cast<std::uint64_t>(part.first) * element,
                          end = begin + static_cast<std::uint64_t>(part.count) * element;
      for_each_run(part.box, slice, *wanted, element,
                   [&](std::uint64_t from, std::uint64_t to, std::uint64_t bytes) {
                     const std::uint64_t first = std::max(from, begin), last = std::min(from + bytes, end);
                     if (first >= last) return;
                     part.read(static_cast<std::int64_t>((first - begin) / element),
                               out.subspan(static_cast<std::size_t>(to + first - from),
                                           static_cast<std::size_t>(last - first)));
                   });
    }
  }
  bool in_memory() const override { return false; }
  void describe(HfSource&) const override {}

 private:
  std::vector<PartedTensor> tensors_;
  std::vector<SafetensorsEntry> entries_;
  std::unordered_map<std::string_view, std::size_t> index_;  // keys are names in entries_
};

}  // namespace

std::function<void(std::int64_t, std::span<std::byte>)> elements_of(std::shared_ptr<const TorchFile> file,
                                                                    TorchTensor tensor, std::int64_t base) {
  if (tensor.is_contiguous()) {
    tensor.shape = {tensor.numel()};
    tensor.strides = {1};
    return [file = std::move(file), tensor = std::move(tensor), base](std::int64_t element,
                                                                      std::span<std::byte> out) {
      file->read_rows(tensor, base + element, static_cast<std::int64_t>(out.size() / size_of(tensor.dtype)),
                      out);
    };
  }
  return [file = std::move(file), tensor = std::move(tensor), base](std::int64_t element,
                                                                    std::span<std::byte> out) {
    const std::size_t size = size_of(tensor.dtype);
    std::vector<std::byte> whole(static_cast<std::size_t>(tensor.numel()) * size);
    file->read(tensor, whole);
    std::memcpy(out.data(), whole.data() + static_cast<std::size_t>(base + element) * size, out.size());
  };
}

Shape shape_of(const std::vector<std::int64_t>& dims, const fs::path& origin, const std::string& name) {
  if (dims.size() > static_cast<std::size_t>(Shape::kMaxRank))
    bad_file(origin, "tensor '" + name + "'", detail::concat("has ", dims.size(), " dimensions"),
             detail::concat("Models have at most ", Shape::kMaxRank, "."));
  std::int64_t elements = 1;
  for (const std::int64_t extent : dims) {
    if (__builtin_mul_overflow(elements, std::max<std::int64_t>(1, extent), &elements) ||
        elements > kMostExtent)
      bad_file(origin, "tensor '" + name + "'", "is larger than any file", "The checkpoint is damaged.");
  }
  return Shape(std::span(dims));
}

PartedTensor whole_tensor(const std::string& name, const std::shared_ptr<const TorchFile>& file,
                          const TorchTensor& tensor) {
  const Shape shape = shape_of(tensor.shape, file->path(), name);
  return {name,
          tensor.dtype,
          shape,
          {{.box = TensorSlice::whole(shape), .count = shape.numel(), .read = elements_of(file, tensor)}}};
}

std::unique_ptr<HfStorage> parts_of(std::vector<PartedTensor> tensors, const fs::path& origin) {
  return std::make_unique<Parts>(std::move(tensors), origin);
}

std::unique_ptr<HfStorage> parts_of(std::vector<PartedTensor> tensors, const ModelSpec& spec,
                                    const fs::path& origin, std::vector<std::string>& notes) {
  for (PartedTensor& tensor : tensors) tensor.name = unwrapped(std::move(tensor.name));
  const std::optional<std::string> prefix = prefix_of(tensors, spec.names);
  if (!prefix)
    bad_file(origin, "",
             detail::concat("holds no tensor whose name ends in '", spec.names.embedding,
                            ".weight', the embedding of a '", spec.name, "'"),
             "Check that config.json is that of this model.");
  std::vector<PartedTensor> kept;
  std::size_t others = 0;
  for (PartedTensor& tensor : tensors) {
    if (!tensor.name.starts_with(*prefix) || (prefix->empty() && is_other(tensor.name))) {
      ++others;
      continue;
    }
    tensor.name.erase(0, prefix->size());
    kept.push_back(std::move(tensor));
  }
  if (others > 0)
    notes.push_back(
        detail::concat(others, " tensors beside the model's, such as an optimizer's, are not taken over"));
  return parts_of(std::move(kept), origin);
}

}  // namespace tessera::checkpoint_detail
