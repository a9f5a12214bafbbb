#include <algorithm>
#include <array>
#include <cctype>
#include <memory>

#include "checkpoint/file_io.hpp"
#include "checkpoint/hf_names.hpp"
#include "checkpoint/megatron_model.hpp"
#include "checkpoint/megatron_slices.hpp"
#include "checkpoint/torch_folders.hpp"

namespace tessera {

using namespace checkpoint_detail;
using Kind = PickleValue::Kind;

namespace {

/// How Megatron Core, until 0.15, calls what data ranks have of the optimizer's tensors, each in a piece.
constexpr const char* kModelSpace = "fully_sharded_model_space";

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

/// Whose value a tensor of the checkpoint is, and the name of the weight.
std::pair<std::optional<RunValue>, std::string> value_of(const std::string& name) {
  constexpr std::array<std::pair<std::string_view, RunValue>, 4> kKinds = {
      {{"optimizer.state.fp32_param.", RunValue::weight},
       {"optimizer.state.param.", RunValue::weight},
       {"optimizer.state.exp_avg.", RunValue::exp_avg},
       {"optimizer.state.exp_avg_sq.", RunValue::exp_avg_sq}}};
  for (const auto& [prefix, value] : kKinds) {
    if (name.starts_with(prefix)) return {value, name.substr(prefix.size())};
  }
  return {std::nullopt, name};
}

TorchTensor described(DType dtype, std::span<const std::int64_t> dims) {
  TorchTensor tensor;
  tensor.dtype = dtype;
  tensor.shape.assign(dims.begin(), dims.end());
  tensor.strides = contiguous_strides(dims);
  return tensor;
}

}  // namespace

/// Adds a tensor, or each layer of it where it is of all layers.
void MegatronModel::Impl::take_whole(const std::shared_ptr<const HfStorage>& all, const PartedName& tensor,
                                     bool tied, Set& to, std::set<std::string>& unexpected) {
  const SafetensorsEntry& entry = *all->find(tensor.stored);
  const std::optional<std::size_t> number = missing_number(tensor.name);
  const std::span<const std::int64_t> dims = entry.shape.dims();
  const std::int64_t layers = !number ? 1 : dims.empty() ? 0 : dims[0];
  const std::int64_t most = settings.num_layers + 1;  // one too many says that there are
  for (std::int64_t layer = 0; layer < std::min(layers, most); ++layer) {
    holders.push_back(std::make_unique<DistributedTensor>(all, dir / ".metadata", entry.name,
                                                          number ? std::optional(layer) : std::nullopt));
    std::string name = tensor.name;
    if (number) name.insert(*number, std::to_string(layer) + ".");
    take(*holders.back(), name, described(entry.dtype, number ? dims.subspan(1) : dims), 0, tied, to,
         unexpected);
  }
}

std::vector<MegatronModel::Impl::Set*> MegatronModel::Impl::every_set() {
  std::vector<Set*> sets = {&weights};
  for (std::size_t value = 0; run && value < run->values.size(); ++value) sets.push_back(&run->values[value]);
  return sets;
}

void MegatronModel::Impl::read_distributed(const TorchFile& common, const MegatronArgs& args,
                                           SymbolicLinks links, std::set<std::string>& unexpected) {
  const bool tied = *args.model.tied_head;
  take_version(common);
  if (version < 2)
    bad_file(common.path(), "checkpoint_version", detail::concat(version, " is not one of this format"),
             kWholeMegatron);
  TorchFacts facts;
  DcpContents contents;
  if (run) {
    contents = dcp_contents(dir, links);
    take_distributed_facts(common, contents.blobs, links);
  } else {
    contents.tensors = dcp_tensors(dir, links, facts);
  }
  std::erase_if(contents.tensors,
                [](const PartedTensor& each) { return each.name.starts_with("rng_state"); });
  std::vector<std::string> names;
  for (const PartedTensor& each : contents.tensors) names.push_back(each.name);
  const std::shared_ptr<const HfStorage> all = parts_of(std::move(contents.tensors), dir);
  if (std::ranges::any_of(names, reads_encoder)) take_two_stacks(args);
  for (const std::string& name : names) {
    const auto [value, rest] = value_of(name);
    take_whole(all, {name, rest}, tied, value ? run->values[static_cast<std::size_t>(*value)] : weights,
               unexpected);
  }
  for (Set* set : every_set()) {  // an optimizer has one value under either name
    for (auto it = set->copies.begin(); it != set->copies.end();) {
      const bool only = it->first != kEmbedding && !set->tensors.contains(it->first);
      if (only) set->tensors[it->first] = it->second;
      it = only ? set->copies.erase(it) : std::next(it);
    }
  }
  if (facts.moments > 0) notes.push_back("the optimizer's state is left out");
}

/// Groups, counts and scaler, and whether the state is one that is read.
void MegatronModel::Impl::take_distributed_facts(const TorchFile& common,
                                                 const std::map<std::string, DcpPlace>& blobs,
                                                 SymbolicLinks links) {
  OptimizerValues said(common);
  const PickleValue* state = common.root().find("optimizer");
  if (!state || !state->is(Kind::dict))
    said.fail("optimizer", "there is none in this checkpoint", kWeightsAlone);
  for (const auto& [key, each] : state->entries) {
    if (key->is(Kind::integer))
      said.fail("optimizer", "is a chain of several (chained) optimizers, which is not read", kWeightsAlone);
  }
  const PickleValue* type = state->find("param_state_sharding_type");
  if (type && (!type->is(Kind::text) || (type->text != kReshardable && type->text != kModelSpace)))
    said.fail("optimizer.param_state_sharding_type",
              (type->is(Kind::text) ? "'" + type->text + "'" : "of a " + type->describe()) +
                  " follows the layout and is not read; fully_reshardable and fully_sharded_model_space are",
              "Save once more in Megatron with --dist-ckpt-optim-fully-reshardable, or convert the weights "
              "alone, without --with_optimizer.");
  const PickleValue* inner = state->find("optimizer");
  const PickleValue* groups = inner ? inner : state;
  if (groups->find("param_groups")) {
    said.groups(*groups);
    if (const PickleValue* steps = groups->find("state"))
      said.count(steps->find("common_step"), "optimizer.state.common_step");
    OptimizerFacts facts = said.facts();
    facts.scaler = said.scaler(state->find("grad_scaler"));
    if (facts.counted) take_facts(facts, common.path());
  } else {
    take_group_blobs(blobs, links);
  }
  if (!run->counted)
    said.fail("optimizer", "does not say how many updates it has made (step)", kWeightsAlone);
}

/// The distributed optimizer's groups of each part of the model, which lie beside its tensors.
void MegatronModel::Impl::take_group_blobs(const std::map<std::string, DcpPlace>& blobs,
                                           SymbolicLinks links) {
  for (const auto& blob : blobs) {
    const std::string& name = blob.first;
    const DcpPlace& place = blob.second;
    const std::size_t slash = name.find(".optimizer/");
    if (!name.starts_with("optimizer.distributed.") || slash == std::string::npos) continue;
    const auto open = [&](const DcpPlace& at) {
      files.push_back(std::make_unique<TorchFile>(at.file, at.offset, at.bytes, links));
      const PickleValue& root = files.back()->root();
      if (!root.is(Kind::list) || root.items.size() != 1)
        bad_file(at.file, name, "is a " + root.describe() + ", not a list of one", kWholeMegatron);
      return root.items[0];
    };
    const PickleValue* inner = open(place);
    OptimizerValues said(*files.back());
    said.groups(*inner);
    OptimizerFacts facts = said.facts();
    const auto scaler = blobs.find(name.substr(0, slash) + ".grad_scaler/" + name.substr(slash + 11));
    if (scaler != blobs.end()) {
      const PickleValue* own = open(scaler->second);
      facts.scaler = OptimizerValues(*files.back()).scaler(own);
    }
    if (facts.counted) take_facts(facts, place.file);
  }
}

/// Every parameter has its main weight and moments, each as large as the weight.
void MegatronModel::Impl::check_distributed_run() {
  Set& masters = run->values[static_cast<std::size_t>(RunValue::weight)];
  const bool plain = masters.tensors.empty();
  if (plain && run->training.settings.training.precision == Precision::fp32)
    masters.tensors = weights.tensors;
  for (const RunValue value : kRunValues) {
    const Set& set = run->values[static_cast<std::size_t>(value)];
    const char* what = value == RunValue::weight ? "main weight" : torch_name(value);
    for (const auto& [name, weight] : weights.tensors) {
      const auto it = set.tensors.find(name);
      if (it == set.tensors.end() || it->second.ranks.size() != 1)
        bad_file(dir / ".metadata", name, detail::concat("its ", what, " is missing, or there several times"),
                 kWeightsAlone);
      const TorchTensor& found = it->second.ranks[0].second;
      if (found.dtype != DType::f32 || found.shape != weight.ranks[0].second.shape)
        bad_file(dir / ".metadata", name,
                 detail::concat("its ", what, " is ", found.describe(), "; the weight is ",
                                weight.ranks[0].second.describe(), " and needs as many float32"),
                 kWeightsAlone);
    }
    for (const auto& [name, each] : set.tensors) {
      if (!weights.tensors.contains(name))
        bad_file(dir / ".metadata", name, detail::concat("the ", what, " of no weight of the model"),
                 kWholeMegatron);
    }
  }
}

}  // namespace tessera
