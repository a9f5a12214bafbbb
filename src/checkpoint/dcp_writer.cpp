#include "checkpoint/file_io.hpp"
#include "checkpoint/hf_plan.hpp"
#include "checkpoint/tessera_folder.hpp"
#include "checkpoint/torch_file.hpp"
#include "tessera/checkpoint/hf.hpp"
#include "tessera/checkpoint/staged_directory.hpp"

namespace tessera {
namespace {

using namespace checkpoint_detail;
namespace fs = std::filesystem;

constexpr const char* kMetadataModule = "torch.distributed.checkpoint.metadata";

struct Stored {
  TensorSpec tensor;
  std::string file;
  std::uint64_t bytes = 0;
};

Shape origin_of(const Shape& shape) { return TensorSlice::whole(shape).offset; }

void put_tensor(TorchPickle& pickle, const std::string& name, const TensorSpec& tensor) {
  pickle.text(name).begin_object(kMetadataModule, "TensorStorageMetadata");
  pickle.text("properties").tensor_properties(tensor.dtype);
  pickle.text("size").size(tensor.shape);
  pickle.text("chunks").begin_list().begin_object(kMetadataModule, "ChunkStorageMetadata");
  pickle.text("offsets").size(origin_of(tensor.shape)).text("sizes").size(tensor.shape);
  pickle.end_object().end_list().end_object();
}

void put_place(TorchPickle& pickle, const std::string& name, const Stored& stored) {
  pickle.begin_object(kMetadataModule, "MetadataIndex").text("fqn").text(name);
  pickle.text("offset").size(origin_of(stored.tensor.shape)).text("index").integer(0).end_object();
  pickle.begin_object("torch.distributed.checkpoint.filesystem", "_StorageInfo")
      .text("relative_path")
      .text(stored.file);
  pickle.text("offset")
      .integer(0)
      .text("length")
      .integer(static_cast<std::int64_t>(stored.bytes))
      .end_object();
}

/// The one pickle that says what is where, and how names were keys of nested dicts.
std::string metadata_of(const std::vector<Stored>& all, const std::string& key) {
  const auto name_of = [&](const Stored& stored) {
    return key.empty() ? stored.tensor.name : key + "." + stored.tensor.name;
  };
  TorchPickle pickle;
  pickle.begin_object(kMetadataModule, "Metadata").text("state_dict_metadata").begin_dict();
  for (const Stored& stored : all) put_tensor(pickle, name_of(stored), stored.tensor);
  pickle.end_dict().text("planner_data").begin_dict();
  for (const Stored& stored : all) {
    pickle.text(name_of(stored)).begin_tuple();
    if (!key.empty()) pickle.text(key);
    pickle.text(stored.tensor.name).end_tuple();
  }
  pickle.end_dict().text("storage_data").begin_dict();
  for (const Stored& stored : all) put_place(pickle, name_of(stored), stored);
  return pickle.end_dict().end_object().finish();
}

}  // namespace

void export_dcp(const fs::path& out, const Architecture& config, const WeightSource& weights,
                const std::string& key, const ExportOptions& options) {
  require_unused(out);
  const std::vector<TensorSpec> specs = checked_specs(config, weights);
  const HfPlan plan = plan_names(config, options.source, specs, options.dtype);
  const std::string config_json = config_text(config, options, plan.tensors.front().dtype);
  StagedDirectory folder(out, Existing::refuse);
  std::vector<Stored> all;
  write_tensors(plan, specs, weights, [&](const TensorSpec& tensor, const auto& body) {
    TorchPickle pickle;
    pickle.tensor(tensor.dtype, tensor.shape);
    Stored& stored = all.emplace_back(Stored{tensor, detail::concat("__0_", all.size(), ".distcp")});
    const fs::path path = folder.path() / stored.file;
    write_torch_file(path, std::move(pickle), [&](std::size_t, const HfAppend& append) { body(append); });
    stored.bytes = fs::file_size(path);
  });
  if (!options.extra_files.empty()) copy_extra_files(options.extra_files, folder.path(), options.links);
  write_text(folder.path() / "config.json", config_json);
  write_text(folder.path() / ".metadata", metadata_of(all, key));
  TorchFacts facts;
  open_torch(TorchFormat::dcp, folder.path(), folder.path() / "config.json",
             facts);  // what will be trusted later
  folder.publish();
}

}  // namespace tessera
