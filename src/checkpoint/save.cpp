#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "checkpoint/checkpoint_dirs.hpp"
#include "checkpoint/file_io.hpp"
#include "checkpoint/json_strict.hpp"
#include "checkpoint/slice_runs.hpp"
#include "tessera/base/version.hpp"
#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/checkpoint/staged_directory.hpp"

namespace tessera {
namespace {

using namespace checkpoint_detail;
namespace fs = std::filesystem;

void tell(const SaveOptions& options, SavePhase phase) {
  if (options.on_phase) options.on_phase(phase);
}

/// A name per box: the tensor's own, and for further boxes of the same tensor one with a number.
std::vector<TensorSpec> name_boxes(std::span<const CheckpointTensor> tensors) {
  std::unordered_map<std::string_view, int> seen;
  std::vector<TensorSpec> specs;
  for (const CheckpointTensor& tensor : tensors) {
    check_slice(tensor.name, tensor.shape, tensor.slice);
    const int count = seen[tensor.name]++;
    specs.push_back({count == 0 ? tensor.name : detail::concat(tensor.name, "@", count), tensor.dtype,
                     tensor.slice.shape});
  }
  return specs;
}

Json dims(const Shape& shape) { return std::vector<std::int64_t>(shape.dims().begin(), shape.dims().end()); }

std::string to_record(const std::string& file, std::span<const CheckpointTensor> tensors,
                      std::span<const TensorSpec> specs, const SafetensorsSummary& summary) {
  std::unordered_map<std::string_view, const SafetensorsSummary::Tensor*> written;
  for (const auto& tensor : summary.tensors) written[tensor.name] = &tensor;
  Json pieces = Json::array();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& place = *written.at(specs[i].name);
    pieces.push_back({{"name", tensors[i].name},
                      {"key", specs[i].name},
                      {"dtype", static_cast<int>(tensors[i].dtype)},
                      {"shape", dims(tensors[i].shape)},
                      {"placement", tensors[i].placement},
                      {"offset", dims(tensors[i].slice.offset)},
                      {"extent", dims(tensors[i].slice.shape)},
                      {"begin", place.begin},
                      {"end", place.end},
                      {"crc32", place.crc32}});
  }
  return to_text({{"file", file},
                  {"bytes", summary.file_bytes},
                  {"header_bytes", summary.header_bytes},
                  {"header_crc32", summary.header_crc32},
                  {"pieces", std::move(pieces)}},
                 -1);
}

void add_record(const JsonView& record, Manifest& manifest,
                std::map<std::string, Manifest::Tensor>& tensors) {
  const std::size_t file = manifest.files.size();
  manifest.files.push_back({record["file"].text(), static_cast<std::uint64_t>(record["bytes"].integer()),
                            static_cast<std::uint64_t>(record["header_bytes"].integer()),
                            static_cast<std::uint32_t>(record["header_crc32"].integer())});
  const JsonView pieces = record["pieces"];
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const JsonView place = pieces[i];
    const auto dtype = static_cast<DType>(place["dtype"].integer(0, static_cast<int>(DType::u8)));
    auto [it, is_new] = tensors.try_emplace(place["name"].text());
    Manifest::Tensor& tensor = it->second;
    if (is_new) {
      tensor = {it->first, dtype, place["shape"].shape(), place["placement"].text(), {}};
    } else if (!(tensor.dtype == dtype && tensor.shape == place["shape"].shape())) {
      place.fail("ranks disagree about the dtype or shape of '" + tensor.name + "'");
    }
    const JsonView crc = place["crc32"];
    std::vector<std::uint32_t> values;
    for (std::size_t j = 0; j < crc.size(); ++j)
      values.push_back(static_cast<std::uint32_t>(crc[j].integer()));
    tensor.pieces.push_back({file,
                             place["key"].text(),
                             {place["offset"].shape(), place["extent"].shape()},
                             static_cast<std::uint64_t>(place["begin"].integer()),
                             static_cast<std::uint64_t>(place["end"].integer()),
                             std::move(values)});
  }
}

}  // namespace

struct CheckpointSave::Impl {
  fs::path root;
  std::int64_t step;
  SaveOptions options;
  std::optional<StagedDirectory> folder;
};

CheckpointSave::CheckpointSave(fs::path root, std::int64_t step, std::uint64_t bytes, SaveOptions options)
    : impl_(std::make_unique<Impl>()) {
  TESSERA_CHECK(step >= 0, "a checkpoint's step must not be negative: ", step);
  TESSERA_CHECK(options.keep >= 0, "keep must be 0 (all) or more, not ", options.keep);
  std::error_code error;
  fs::create_directories(root, error);
  if (error) io_failed("create", root, error.value());
  remove_leftovers(root);
  require_free_space(root, bytes);
  impl_->root = std::move(root);
  impl_->step = step;
  impl_->options = std::move(options);
  impl_->folder.emplace(impl_->root / checkpoint_name(step));
  tell(impl_->options, SavePhase::started);
}

CheckpointSave::~CheckpointSave() = default;

const fs::path& CheckpointSave::staging() const { return impl_->folder->path(); }

fs::path CheckpointSave::commit(const CheckpointState& state, std::span<const std::string> records) {
  Impl& self = *impl_;
  TESSERA_CHECK(self.folder.has_value(), "this checkpoint is already committed");
  TESSERA_CHECK_EQ(state.step, self.step, "step of the state and of the save");
  Manifest manifest{.state = state, .chunk_bytes = self.options.chunk_bytes, .files = {}, .tensors = {}};
  manifest.state.tessera_version = version();
  std::map<std::string, Manifest::Tensor> tensors;
  for (const std::string& text : records) {
    const Json record = parse_json(text, "shard record");
    add_record(JsonView(record, "shard record"), manifest, tensors);
  }
  for (auto& [name, tensor] : tensors) manifest.tensors.push_back(std::move(tensor));
  write_manifest(manifest, staging() / kManifestName);
  // Read back what will be trusted later: a hole or overlap between ranks' boxes shows here, not at resume.
  const CheckpointReader written(staging());
  tell(self.options, SavePhase::manifest_written);
  self.folder->publish();
  self.folder.reset();
  const fs::path dir = self.root / checkpoint_name(self.step);
  tell(self.options, SavePhase::published);
  write_text(self.root / kLatestName, checkpoint_name(self.step) + "\n");
  sync_directory(self.root);
  tell(self.options, SavePhase::pointer_written);
  if (self.options.keep > 0) prune_checkpoints(self.root, self.options.keep, self.step, state.run);
  tell(self.options, SavePhase::pruned);
  return dir;
}

std::string write_checkpoint_shard(const fs::path& staging, const std::string& file,
                                   std::span<const CheckpointTensor> tensors, const SaveOptions& options) {
  TESSERA_CHECK(is_plain_file_name(file), "\"", file, "\" is not a plain file name");
  TESSERA_CHECK(options.chunk_bytes > 0, "chunk_bytes must be positive");
  const std::vector<TensorSpec> specs = name_boxes(tensors);
  SafetensorsWriter writer(staging / file, specs, {.metadata = {}, .chunk_bytes = options.chunk_bytes});
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto made = tensors[i].read ? tensors[i].read() : nullptr;
    writer.append(specs[i].name, {made ? made.get() : tensors[i].data, specs[i].bytes()});
    tell(options, SavePhase::tensor_written);
  }
  const SafetensorsSummary summary = writer.finish();
  tell(options, SavePhase::shard_written);
  return to_record(file, tensors, specs, summary);
}

fs::path save_checkpoint(const fs::path& root, const CheckpointState& state,
                         std::span<const CheckpointTensor> tensors, const SaveOptions& options) {
  constexpr const char* kOnlyFile = "model_tp_0_pp_0.safetensors";
  constexpr std::uint64_t kManifestRoom = 1 << 20;
  const std::uint64_t bytes = safetensors_file_bytes(name_boxes(tensors)) + kManifestRoom;
  CheckpointSave save(root, state.step, bytes, options);
  const std::string record = write_checkpoint_shard(save.staging(), kOnlyFile, tensors, options);
  return save.commit(state, {&record, 1});
}

}  // namespace tessera
