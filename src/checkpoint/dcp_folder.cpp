#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>

#include "checkpoint/torch_folders.hpp"

namespace tessera::checkpoint_detail {
namespace {

namespace fs = std::filesystem;
using Kind = PickleValue::Kind;

constexpr std::uint64_t kMostMetadata = 1u << 30;
constexpr const char* kDcpRemedy =
    "Check that the checkpoint is whole and was written by torch.distributed.checkpoint.";

/// One chunk: a file of torch.save within another.
struct Place {
  std::string file;
  std::uint64_t offset = 0, bytes = 0;
};

/// Opens one chunk at a time, so that thousands of them need no thousand descriptors.
class Chunks {
 public:
  Chunks(fs::path dir, SymbolicLinks links) : dir_(std::move(dir)), links_(links) {}

  /// The chunk's file and the tensor in it.
  std::pair<std::shared_ptr<const TorchFile>, TorchTensor> open(const Place& place) {
    const std::scoped_lock lock(mutex_);
    if (!file_ || std::tie(place.file, place.offset) != std::tie(last_.file, last_.offset)) {
      file_ = std::make_shared<const TorchFile>(dir_ / place.file, place.offset, place.bytes, links_);
      last_ = place;
    }
    const std::optional<TorchTensor> tensor = file_->tensor(file_->root());
    if (!tensor)
      bad_file(dir_ / place.file, detail::concat("byte ", place.offset),
               "a " + file_->root().describe() + " stands where a tensor should", kDcpRemedy);
    return {file_, *tensor};
  }

 private:
  fs::path dir_;
  SymbolicLinks links_;
  std::mutex mutex_;
  Place last_;
  std::shared_ptr<const TorchFile> file_;
};

class Metadata {
 public:
  Metadata(const fs::path& dir, SymbolicLinks links)
      : dir_(dir), origin_(dir / ".metadata"), chunks_(std::make_shared<Chunks>(dir, links)) {
    const std::string text = read_text(origin_, kMostMetadata, links);
    pickle_.emplace(std::as_bytes(std::span(text)), origin_.string());
  }

  std::vector<PartedTensor> tensors(TorchFacts& counts, RunValue value) {
    std::vector<PartedTensor> out;
    const auto take = [&](const std::string& name, const PickleValue& facts) {
      if (value == RunValue::weight) {
        if (is_moment(name) || name.starts_with("optimizer.")) {
          ++counts.moments;
        } else {
          out.push_back(tensor_of(name, facts));
        }
        return;
      }
      if (name.ends_with(".step")) count(tensor_of(name, facts), counts);
      const std::string ending = std::string(".") + torch_name(value);
      if (!is_moment(name) || !name.ends_with(ending)) return;
      out.push_back(tensor_of(name, facts));
      out.back().name.erase(out.back().name.size() - ending.size());
    };
    for_each(take, [](const std::string&) {});
    return out;
  }

  DcpContents everything() {
    DcpContents out;
    const auto take = [&](const std::string& name, const PickleValue& facts) {
      out.tensors.push_back(tensor_of(name, facts));
      flatten_back(out.tensors.back());
    };
    for_each(take, [&](const std::string& name) {
      const auto place = places_.find({name, {}});
      if (place == places_.end()) fail("'" + name + "'", "nothing says where it lies");
      const Place& at = place->second;
      out.blobs.emplace(name, DcpPlace{dir_ / at.file, at.offset, at.bytes});
    });
    return out;
  }

 private:
  /// What the checkpoint holds: `tensor(name, what is said of it)`, or `blob(name)`.
  template <typename Tensor, typename Blob>
  void for_each(Tensor tensor, Blob blob) {
    read_places();
    for (const auto& [name, facts] : member(pickle_->root(), "state_dict_metadata", Kind::dict).entries) {
      if (!name->is(Kind::text)) fail("", "a tensor's name is a " + name->describe());
      if (facts->is(Kind::object) && facts->text.ends_with(".TensorStorageMetadata")) {
        tensor(name->text, *facts);
      } else if (facts->is(Kind::object) && facts->text.ends_with(".BytesStorageMetadata")) {
        blob(name->text);
      } else {
        fail("'" + name->text + "'", "is described by a " + facts->describe());
      }
    }
  }

  [[noreturn]] void fail(const std::string& where, const std::string& reason) const {
    bad_file(origin_, where, reason, kDcpRemedy);
  }
  const PickleValue& member(const PickleValue& value, const char* name, Kind kind) const {
    const PickleValue* found = value.find(name);
    if (!found || !found->is(kind))
      fail(value.describe(),
           detail::concat("has ", found ? "a " + found->describe() + " for" : std::string("no"), " '", name,
                          "'"));
    return *found;
  }
  std::vector<std::int64_t> extents_in(const PickleValue& value, const std::string& name) const {
    const auto list = extents(value);
    if (!list) fail("'" + name + "'", "has an extent or offset that is none");
    return *list;
  }

  /// Whether it is a tensor that an optimizer keeps beside a weight.
  static bool is_moment(std::string_view name) {
    constexpr std::array endings = {".exp_avg", ".exp_avg_sq", ".max_exp_avg_sq", ".step",
                                    ".momentum_buffer"};
    return (name.starts_with("state.") || name.find(".state.") != std::string_view::npos) &&
           std::any_of(endings.begin(), endings.end(),
                       [&](const char* each) { return name.ends_with(each); });
  }

  /// One parameter's count of updates, which is that of all.
  void count(const PartedTensor& step, TorchFacts& out) const {
    if (step.shape.numel() != 1 || step.parts.empty()) return;
    std::array<std::byte, 8> bytes{};
    const std::span<std::byte> stored = std::span(bytes).first(size_of(step.dtype));
    step.parts[0].read(0, stored);
    std::int64_t updates = 0;
    if (step.dtype == DType::i64) {
      std::memcpy(&updates, stored.data(), sizeof(updates));
    } else if (step.dtype == DType::f32) {
      float value = 0;
      std::memcpy(&value, stored.data(), sizeof(value));
      updates = std::llround(value);
    } else {
      fail("'" + step.name + "'", detail::concat("is a ", step.dtype, ", no count of updates"));
    }
    if (out.updates >= 0 && out.updates != updates)
      fail("'" + step.name + "'",
           detail::concat("says ", updates, " updates, another parameter's ", out.updates));
    out.updates = updates;
  }

  void read_places() {
    for (const auto& [index, info] : member(pickle_->root(), "storage_data", Kind::dict).entries) {
      const std::string& name = member(*index, "fqn", Kind::text).text;
      const PickleValue* offset = index->find("offset");
      const PickleValue& file = member(*info, "relative_path", Kind::text);
      if (!is_plain_file_name(file.text))
        fail("'" + name + "'", "lies in '" + file.text + "', which is no file of this folder");
      if (const PickleValue* how = info->find("transform_descriptors"); how && !how->is(Kind::none))
        fail("'" + name + "'", "is compressed or otherwise transformed, which is not read");
      const std::int64_t begin = member(*info, "offset", Kind::integer).integer,
                         bytes = member(*info, "length", Kind::integer).integer;
      if (begin < 0 || bytes < 0) fail("'" + name + "'", "lies at a negative place");
      places_[{name, offset && offset->is(Kind::tuple) ? extents_in(*offset, name)
                                                       : std::vector<std::int64_t>()}] = {
          file.text, static_cast<std::uint64_t>(begin), static_cast<std::uint64_t>(bytes)};
    }
  }

  PartedTensor tensor_of(const std::string& name, const PickleValue& facts) {
    PartedTensor tensor;
    tensor.name = name;
    tensor.shape = shape_of(extents_in(member(facts, "size", Kind::tuple), name), origin_, name);
    bool first = true;
    for (const PickleValue* chunk : member(facts, "chunks", Kind::list).items) {
      const std::vector<std::int64_t> offsets = extents_in(member(*chunk, "offsets", Kind::tuple), name);
      const TensorSlice box{shape_of(offsets, origin_, name),
                            shape_of(extents_in(member(*chunk, "sizes", Kind::tuple), name), origin_, name)};
      if (box.offset.rank() != tensor.shape.rank() || box.shape.rank() != tensor.shape.rank())
        fail("'" + name + "'", "has a part of another number of dimensions");
      if (box.shape.numel() == 0) continue;
      const auto place = places_.find({name, offsets});
      if (place == places_.end())
        fail("'" + name + "'", detail::concat("nothing says where its part at ", box.offset, " lies"));
      const TorchTensor stored = chunks_->open(place->second).second;
      if (!(shape_of(stored.shape, dir_ / place->second.file, name) == box.shape))
        fail("'" + name + "'", detail::concat("its part at ", box.offset, " is ", stored.describe(), " in ",
                                              place->second.file, ", not ", box.shape));
      if (!first && tensor.dtype != stored.dtype) fail("'" + name + "'", "has parts of several types");
      tensor.dtype = stored.dtype;
      first = false;
      tensor.parts.push_back(
          {.box = box,
           .count = box.shape.numel(),
           .read = [chunks = chunks_, at = place->second](std::int64_t element, std::span<std::byte> out) {
             auto [file, found] = chunks->open(at);
             elements_of(std::move(file), std::move(found))(element, out);
           }});
    }
    return tensor;
  }

  /// Megatron Core stored, until 0.15, what data ranks have of a flat tensor as [blocks of each dimension...,
  /// elements of a block], and in `mcore_data` which shape the whole has.
  void flatten_back(PartedTensor& tensor) const {
    const PickleValue* all = pickle_->root().find("mcore_data");
    const PickleValue* own = all && all->is(Kind::dict) ? all->find(tensor.name) : nullptr;
    const PickleValue* given = own ? own->find("nd_reformulated_orig_global_shape") : nullptr;
    if (!given) return;
    const Shape whole = shape_of(extents_in(*given, tensor.name), origin_, tensor.name);
    const auto unfit = [&] {
      fail("'" + tensor.name + "'", detail::concat("is ", tensor.shape, ", which are no blocks of ", whole));
    };
    if (tensor.shape.rank() != whole.rank() + 1) unfit();
    std::vector<std::int64_t> block;
    for (int i = 0; i < whole.rank(); ++i) {
      if (tensor.shape[i] < 1 || whole[i] % tensor.shape[i] != 0) unfit();
      block.push_back(whole[i] / tensor.shape[i]);
    }
    const Shape box{std::span<const std::int64_t>(block)};
    if (box.numel() != tensor.shape[whole.rank()]) unfit();
    for (TensorPart& part : tensor.parts) {
      std::vector<std::int64_t> offset;
      for (int i = 0; i < whole.rank(); ++i) {
        if (part.box.shape[i] != 1 || part.box.offset[i] >= tensor.shape[i])
          fail("'" + tensor.name + "'", "has a part that is of no block, or of several");
        offset.push_back(part.box.offset[i] * block[static_cast<std::size_t>(i)]);
      }
      part.first = part.box.offset[whole.rank()];
      if (part.first > box.numel() - part.count)
        fail("'" + tensor.name + "'", "has a part that reaches beyond its block");
      part.box = {Shape(std::span<const std::int64_t>(offset)), box};
    }
    tensor.shape = whole;
  }

  fs::path dir_, origin_;
  std::shared_ptr<Chunks> chunks_;
  std::optional<Pickle> pickle_;
  std::map<std::pair<std::string, std::vector<std::int64_t>>, Place> places_;  // by name and offsets
};

}  // namespace

std::vector<PartedTensor> dcp_tensors(const fs::path& dir, SymbolicLinks links, TorchFacts& facts,
                                      RunValue value) {
  return Metadata(dir, links).tensors(facts, value);
}

DcpContents dcp_contents(const fs::path& dir, SymbolicLinks links) {
  return Metadata(dir, links).everything();
}

}  // namespace tessera::checkpoint_detail
