#include "checkpoint/torch_folders.hpp"

#include <optional>
#include <set>

#include "checkpoint/tessera_folder.hpp"
#include "checkpoint/weight_index.hpp"

namespace tessera::checkpoint_detail {
namespace {

namespace fs = std::filesystem;

std::vector<PartedTensor> indexed_tensors(const fs::path& index, SymbolicLinks links) {
  const WeightIndex files = parse_weight_index(read_text(index, kMaxTesseraJsonBytes, links), index.string());
  std::set<std::string> names;
  for (const auto& [tensor, file] : files.files) names.insert(file);
  std::vector<PartedTensor> all;
  for (const std::string& name : names) {
    for (PartedTensor& tensor : torch_file_tensors(index.parent_path() / name, links))
      all.push_back(std::move(tensor));
  }
  return all;
}

}  // namespace

std::vector<PartedTensor> torch_file_tensors(const fs::path& path, SymbolicLinks links) {
  const auto file = std::make_shared<const TorchFile>(path, links);
  if (!file->root().is(PickleValue::Kind::dict))
    bad_file(path, "", "holds a " + file->root().describe() + ", not a state_dict",
             "Name the folder of a model's weights.");
  std::vector<PartedTensor> list;
  for (const auto& [name, value] : file->root().entries) {
    const std::optional<TorchTensor> tensor = file->tensor(*value);
    if (tensor && name->is(PickleValue::Kind::text)) list.push_back(whole_tensor(name->text, file, *tensor));
  }
  return list;
}

std::unique_ptr<HfStorage> accelerate_storage(const fs::path& dir, const ModelSpec& spec, SymbolicLinks links,
                                              TorchFacts& facts) {
  const auto has = [&](const char* name) { return fs::exists(dir / name); };
  if (has("model_1.safetensors") || has("pytorch_model_fsdp_1") || has("pytorch_model_1"))
    facts.notes.push_back("the folder holds several models; the first is taken");
  if (has("pytorch_model_fsdp_0"))
    return parts_of(dcp_tensors(dir / "pytorch_model_fsdp_0", links, facts), spec, dir, facts.notes);
  if (has("pytorch_model_fsdp.bin"))
    return parts_of(torch_file_tensors(dir / "pytorch_model_fsdp.bin", links), spec, dir, facts.notes);
  if (has("pytorch_model_fsdp_rank0.bin"))
    bad_file(dir, "pytorch_model_fsdp_rank0.bin",
             "is of state_dict_type LOCAL_STATE_DICT, whose parts do not say what they are",
             "Save with SHARDED_STATE_DICT or FULL_STATE_DICT.");
  if (fs::is_directory(dir / "pytorch_model"))
    return parts_of(deepspeed_tensors(dir / "pytorch_model", links, facts), spec, dir, facts.notes);
  if (has("model.safetensors") || has("model.safetensors.index.json")) return files_of(dir, links);
  if (has("pytorch_model.bin"))
    return parts_of(torch_file_tensors(dir / "pytorch_model.bin", links), spec, dir, facts.notes);
  if (has("pytorch_model.bin.index.json"))
    return parts_of(indexed_tensors(dir / "pytorch_model.bin.index.json", links), spec, dir, facts.notes);
  if (has("latest_checkpointed_iteration.txt"))
    bad_file(dir, "", "is one of Megatron-LM's", "Use --from megatron.");
  bad_file(dir, "", "holds no model that Accelerate saved",
           "It would have model.safetensors, pytorch_model.bin, pytorch_model_fsdp.bin, pytorch_model_fsdp_0 "
           "or pytorch_model.");
}

std::pair<TorchFormat, fs::path> accelerate_moments(const fs::path& dir) {
  if (fs::exists(dir / "optimizer_0")) return {TorchFormat::dcp, dir / "optimizer_0"};
  if (fs::is_directory(dir / "pytorch_model")) return {TorchFormat::deepspeed, dir / "pytorch_model"};
  bad_file(dir, "",
           "holds no optimizer whose tensors have names: those of optimizer.bin have numbers, and which is "
           "which only the "
           "script that saved it knows",
           "FSDP with SHARDED_STATE_DICT and DeepSpeed save names. Convert the weights alone, without "
           "--with_optimizer.");
}

const char* torch_name(RunValue value) {
  switch (value) {
    case RunValue::exp_avg:
      return "exp_avg";
    case RunValue::exp_avg_sq:
      return "exp_avg_sq";
    case RunValue::weight:
      break;
  }
  return "";
}

}  // namespace tessera::checkpoint_detail
