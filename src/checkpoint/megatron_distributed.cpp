#include <algorithm>
#include <cctype>
#include <memory>

#include "checkpoint/file_io.hpp"
#include "checkpoint/megatron_model.hpp"
#include "checkpoint/torch_folders.hpp"

namespace tessera {

using namespace checkpoint_detail;

namespace {

/// A tensor of a checkpoint of torch_dist, or one layer's of those that lie in one.
class DistributedTensor final : public TensorHolder {
 public:
  DistributedTensor(std::shared_ptr<const HfStorage> all, std::filesystem::path path, std::string name,
                    std::optional<std::int64_t> layer)
      : all_(std::move(all)), path_(std::move(path)), name_(std::move(name)), layer_(layer) {}

  const std::filesystem::path& path() const override { return path_; }
  void read(const TorchTensor& tensor, std::span<std::byte> out) const override {
    read_box(tensor.shape, 0, out);
  }
  void read_rows(const TorchTensor& tensor, std::int64_t first, std::int64_t count,
                 std::span<std::byte> out) const override {
    std::vector<std::int64_t> sizes = tensor.shape;
    sizes.at(0) = count;
    read_box(sizes, first, out);
  }

 private:
  void read_box(std::vector<std::int64_t> sizes, std::int64_t first, std::span<std::byte> out) const {
    std::vector<std::int64_t> offsets(sizes.size(), 0);
    if (!offsets.empty()) offsets[0] = first;
    if (layer_) {
      sizes.insert(sizes.begin(), 1);
      offsets.insert(offsets.begin(), *layer_);
    }
    all_->read_slice(name_, {Shape(std::span(offsets)), Shape(std::span(sizes))}, out);
  }

  std::shared_ptr<const HfStorage> all_;
  std::filesystem::path path_;
  std::string name_;
  std::optional<std::int64_t> layer_;
};

/// Where the layer's number is missing in "decoder.layers.mlp.linear_fc1.weight"; nothing where it is there,
/// or the tensor is of no layer.
std::optional<std::size_t> missing_number(const std::string& name) {
  constexpr std::string_view kLayers = ".layers.";
  const std::size_t at = name.find(kLayers);
  if (at == std::string::npos) return std::nullopt;
  const std::size_t next = at + kLayers.size();
  if (next < name.size() && std::isdigit(static_cast<unsigned char>(name[next]))) return std::nullopt;
  return next;
}

TorchTensor described(DType dtype, std::span<const std::int64_t> dims) {
  TorchTensor tensor;
  tensor.dtype = dtype;
  tensor.shape.assign(dims.begin(), dims.end());
  tensor.strides = contiguous_strides(dims);
  return tensor;
}

}  // namespace

void MegatronModel::Impl::read_distributed(const TorchFile& common, bool tied, SymbolicLinks links,
                                           std::set<std::string>& unexpected) {
  take_version(common);
  if (version < 2)
    bad_file(common.path(), "checkpoint_version", detail::concat(version, " is not one of this format"),
             kWholeMegatron);
  TorchFacts facts;
  std::vector<PartedTensor> tensors = dcp_tensors(dir, links, facts);
  std::erase_if(tensors, [](const PartedTensor& each) { return each.name.starts_with("rng_state"); });
  const std::shared_ptr<const HfStorage> all = parts_of(std::move(tensors), dir);
  for (const SafetensorsEntry& entry : all->entries()) {
    const std::optional<std::size_t> number = missing_number(entry.name);
    const std::span<const std::int64_t> dims = entry.shape.dims();
    const std::int64_t layers = !number ? 1 : dims.empty() ? 0 : dims[0];
    for (std::int64_t layer = 0; layer < layers; ++layer) {
      holders.push_back(std::make_unique<DistributedTensor>(all, dir / ".metadata", entry.name,
                                                            number ? std::optional(layer) : std::nullopt));
      std::string name = entry.name;
      if (number) name.insert(*number, std::to_string(layer) + ".");
      take(*holders.back(), name, described(entry.dtype, number ? dims.subspan(1) : dims), 0, tied, weights,
           unexpected);
    }
  }
  if (facts.moments > 0) notes.push_back("the optimizer's state is left out");
}

}  // namespace tessera
