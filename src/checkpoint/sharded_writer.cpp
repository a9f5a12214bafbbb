#include <algorithm>
#include <iomanip>
#include <optional>
#include <sstream>

#include "checkpoint/file_io.hpp"
#include "checkpoint/json_strict.hpp"
#include "tessera/checkpoint/sharded.hpp"

namespace tessera {
namespace {

using namespace checkpoint_detail;

std::string shard_name(std::size_t index, std::size_t count) {
  std::ostringstream name;
  name << "model-" << std::setfill('0') << std::setw(5) << index + 1 << "-of-" << std::setw(5) << count
       << ".safetensors";
  return name.str();
}

/// File name of every tensor: in the given order, a new file whenever the next tensor would make it too
/// large.
std::vector<std::string> split_by_size(std::span<const TensorSpec> tensors, std::uint64_t max_bytes) {
  std::vector<std::size_t> shard_of;
  std::size_t shard = 0;
  std::uint64_t filled = 0;
  for (const TensorSpec& tensor : tensors) {
    if (filled > 0 && filled + tensor.bytes() > max_bytes) {
      ++shard;
      filled = 0;
    }
    filled += tensor.bytes();
    shard_of.push_back(shard);
  }
  std::vector<std::string> names;
  for (const std::size_t i : shard_of)
    names.push_back(shard == 0 ? "model.safetensors" : shard_name(i, shard + 1));
  return names;
}

}  // namespace

struct ShardedWriter::Impl {
  struct Shard {
    std::vector<TensorSpec> tensors;
    std::optional<SafetensorsWriter> writer;
    bool finished = false;
  };
  std::filesystem::path dir;
  Options options;
  std::map<std::string, Shard> shards;
  std::map<std::string, std::string, std::less<>> file_of;
  std::uint64_t total_bytes = 0;

  void open(const std::string& name, Shard& shard) {
    SafetensorsWriter::Options writer_options;
    const auto own = options.file_metadata.find(name);
    writer_options.metadata = own == options.file_metadata.end() ? options.metadata : own->second;
    shard.writer.emplace(dir / name, shard.tensors, std::move(writer_options));
  }

  void close_if_complete(Shard& shard) {
    if (!shard.writer->complete()) return;
    shard.writer->finish();
    shard.writer.reset();
    shard.finished = true;
  }
};

ShardedWriter::ShardedWriter(const std::filesystem::path& dir, std::span<const TensorSpec> tensors)
    : ShardedWriter(dir, tensors, Options{}) {}

ShardedWriter::ShardedWriter(const std::filesystem::path& dir, std::span<const TensorSpec> tensors,
                             Options options)
    : impl_(std::make_unique<Impl>()) {
  Impl& self = *impl_;
  self.dir = dir;
  self.options = std::move(options);
  const bool known = !self.options.layout.empty();
  const std::vector<std::string> split =
      known ? std::vector<std::string>{} : split_by_size(tensors, self.options.max_shard_bytes);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto it = self.options.layout.find(tensors[i].name);
    TESSERA_CHECK(!known || it != self.options.layout.end(), "the layout names no file for '",
                  tensors[i].name, "'");
    const std::string& file = known ? it->second : split[i];
    TESSERA_CHECK(is_plain_file_name(file), "\"", file, "\" is not a plain file name");
    self.shards[file].tensors.push_back(tensors[i]);
    self.file_of[tensors[i].name] = file;
    self.total_bytes += tensors[i].bytes();
  }
  require_free_space(dir, self.total_bytes);
}

ShardedWriter::~ShardedWriter() = default;

void ShardedWriter::append(std::string_view name, std::span<const std::byte> bytes) {
  const auto it = impl_->file_of.find(name);
  TESSERA_CHECK(it != impl_->file_of.end(), "no tensor '", name, "' was announced for ", impl_->dir.string());
  auto& shard = impl_->shards[it->second];
  TESSERA_CHECK(!shard.finished || bytes.empty(), "tensor '", name, "' is already complete");
  if (shard.finished) return;
  if (!shard.writer) impl_->open(it->second, shard);
  shard.writer->append(name, bytes);
  impl_->close_if_complete(shard);
}

void ShardedWriter::finish() {
  Impl& self = *impl_;
  for (auto& [name, shard] : self.shards) {
    if (shard.finished) continue;
    if (!shard.writer) self.open(name, shard);
    shard.writer->finish();  // throws if a tensor lacks bytes
    shard.finished = true;
  }
  if (self.shards.size() > 1 || self.options.force_index) {
    Json index;
    index["metadata"] = self.options.index_metadata.empty()
                            ? Json::object()
                            : parse_json(self.options.index_metadata, "index metadata");
    index["metadata"]["total_size"] = self.total_bytes;
    index["weight_map"] = Json::object();
    for (const auto& [name, file] : self.file_of) index["weight_map"][name] = file;
    write_text(self.dir / "model.safetensors.index.json", to_text(index, 2) + "\n");
  }
  sync_directory(self.dir);
}

}  // namespace tessera
