#include "checkpoint/dcp_writer.hpp"

#include "checkpoint/file_io.hpp"
#include "checkpoint/hf_plan.hpp"
#include "checkpoint/tessera_folder.hpp"
#include "tessera/checkpoint/hf.hpp"
#include "tessera/checkpoint/staged_directory.hpp"

namespace tessera {
namespace checkpoint_detail {
namespace {

constexpr const char* kMetadataModule = "torch.distributed.checkpoint.metadata";
constexpr const char* kFile = "__0_0.distcp";

void put_tensor(TorchPickle& pickle, const TensorSpec& tensor, const std::vector<TensorSlice>& boxes) {
  pickle.begin_object(kMetadataModule, "TensorStorageMetadata");
  pickle.text("properties").tensor_properties(tensor.dtype);
  pickle.text("size").size(tensor.shape);
  pickle.text("chunks").begin_list();
  for (const TensorSlice& box : boxes) {
    pickle.begin_object(kMetadataModule, "ChunkStorageMetadata");
    pickle.text("offsets").size(box.offset).text("sizes").size(box.shape).end_object();
  }
  pickle.end_list().end_object();
}

/// `part`: where and the how manieth of a tensor it is; null: a blob.
void put_index(TorchPickle& pickle, const std::string& name, const TensorSlice* part, std::size_t number) {
  pickle.begin_object(kMetadataModule, "MetadataIndex").text("fqn").text(name).text("offset");
  part ? pickle.size(part->offset) : pickle.none();
  pickle.text("index");
  part ? pickle.integer(static_cast<std::int64_t>(number)) : pickle.none();
  pickle.end_object();
}

void put_place(TorchPickle& pickle, std::uint64_t offset, std::uint64_t bytes) {
  pickle.begin_object("torch.distributed.checkpoint.filesystem", "_StorageInfo")
      .text("relative_path")
      .text(kFile);
  pickle.text("offset").integer(static_cast<std::int64_t>(offset));
  pickle.text("length").integer(static_cast<std::int64_t>(bytes)).end_object();
}

}  // namespace

DcpWriter::DcpWriter(std::filesystem::path folder) : folder_(std::move(folder)), file_(folder_ / kFile) {}

DcpWriter::Entry& DcpWriter::entry(const std::string& name) {
  const auto [it, is_new] = index_.try_emplace(name, entries_.size());
  if (is_new) entries_.push_back({name, std::nullopt, {}, {}});
  return entries_[it->second];
}

DcpWriter::Place DcpWriter::write(TorchPickle pickle, const WriteStorage& body) {
  const std::uint64_t offset = file_.begin_of_archive();
  return {offset, write_torch_archive(file_, "archive", std::move(pickle), body)};
}

void DcpWriter::add(const TensorSpec& whole, const TensorSlice& part,
                    const std::function<void(const Append&)>& body) {
  TorchPickle pickle;
  pickle.tensor(whole.dtype, part.shape);
  Entry& to = entry(whole.name);
  to.tensor = whole;
  to.boxes.push_back(part);
  to.places.push_back(write(std::move(pickle), [&](std::size_t, const Append& append) { body(append); }));
}

void DcpWriter::add_blob(const std::string& name, TorchPickle value) {
  entry(name).places.push_back(write(std::move(value), [](std::size_t, const Append&) {}));
}

void DcpWriter::finish(const std::optional<std::string>& key) {
  file_.sync();
  TorchPickle pickle;
  pickle.begin_object(kMetadataModule, "Metadata").text("state_dict_metadata").begin_dict();
  for (const Entry& each : entries_) {
    pickle.text(each.name);
    if (each.tensor) {
      put_tensor(pickle, *each.tensor, each.boxes);
    } else {
      pickle.begin_object(kMetadataModule, "BytesStorageMetadata").end_object();
    }
  }
  pickle.end_dict().text("planner_data");
  if (key) {
    pickle.begin_dict();
    for (const Entry& each : entries_) {
      pickle.text(each.name).begin_tuple();
      if (!key->empty()) pickle.text(*key);
      pickle.text(key->empty() ? each.name : each.name.substr(key->size() + 1)).end_tuple();
    }
    pickle.end_dict();
  } else {
    pickle.none();
  }
  pickle.text("storage_data").begin_dict();
  for (const Entry& each : entries_) {
    for (std::size_t i = 0; i < each.places.size(); ++i) {
      put_index(pickle, each.name, each.tensor ? &each.boxes[i] : nullptr, i);
      put_place(pickle, each.places[i].offset, each.places[i].bytes);
    }
  }
  write_text(folder_ / ".metadata", pickle.end_dict().end_object().finish());
}

}  // namespace checkpoint_detail

using namespace checkpoint_detail;

void export_dcp(const std::filesystem::path& out, const Architecture& config, const WeightSource& weights,
                const std::string& key, const ExportOptions& options) {
  require_unused(out);
  const std::vector<TensorSpec> specs = checked_specs(config, weights);
  const HfPlan plan = plan_names(config, options.source, specs, options.dtype);
  const std::string config_json = config_text(config, options, plan.tensors.front().dtype);
  require_room_for(out, total_bytes(plan.tensors));
  StagedDirectory folder(out, Existing::refuse);
  DcpWriter writer(folder.path());
  write_tensors(plan, specs, weights, [&](TensorSpec tensor, const auto& body) {
    if (!key.empty()) tensor.name = key + "." + tensor.name;
    writer.add(tensor, TensorSlice::whole(tensor.shape), body);
  });
  if (!options.extra_files.empty()) copy_extra_files(options.extra_files, folder.path(), options.links);
  write_text(folder.path() / "config.json", config_json);
  writer.finish(key);
  TorchFacts facts;
  open_torch(TorchFormat::dcp, folder.path(), folder.path() / "config.json",
             facts);  // what will be trusted later
  folder.publish();
}

}  // namespace tessera
