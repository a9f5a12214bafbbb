#include <zlib.h>

#include <algorithm>
#include <mutex>
#include <tuple>

#include "checkpoint/checkpoint_dirs.hpp"
#include "checkpoint/file_io.hpp"
#include "checkpoint/slice_runs.hpp"
#include "tessera/checkpoint/checkpoint.hpp"

namespace tessera {
namespace {

using namespace checkpoint_detail;
namespace fs = std::filesystem;

constexpr const char* kUseAnother = "Use an earlier checkpoint, or restore this one from a copy.";

std::uint32_t crc_of(std::span<const std::byte> bytes) {
  return static_cast<std::uint32_t>(::crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

}  // namespace

struct CheckpointReader::Impl {
  fs::path dir;
  Manifest manifest;
  std::function<void()> on_progress;
  mutable std::mutex mutex;
  mutable std::vector<std::unique_ptr<SafetensorsReader>> open_files;

  fs::path path_of(std::size_t file) const { return dir / manifest.files[file].name; }

  void check_sizes() const {
    for (const auto& file : manifest.files) {
      const fs::path path = dir / file.name;
      const std::uint64_t bytes = size_of_file(open_for_reading(path, SymbolicLinks::refuse), path);
      if (bytes != file.bytes)
        bad_file(path, "", detail::concat("has ", bytes, " bytes, the manifest says ", file.bytes),
                 kUseAnother);
    }
  }

  /// Opens a shard; its header must be the one the manifest was made with.
  const SafetensorsReader& open(std::size_t file) const {
    const std::lock_guard lock(mutex);
    auto& reader = open_files[file];
    if (reader) return *reader;
    auto opened = std::make_unique<SafetensorsReader>(path_of(file), SymbolicLinks::refuse);
    std::vector<std::byte> header(opened->data_begin());
    opened->read_file(0, header);
    const auto& expected = manifest.files[file];
    if (header.size() != expected.header_bytes || crc_of(header) != expected.header_crc32)
      bad_file(path_of(file), "header", "does not match the manifest's checksum", kUseAnother);
    check_entries(*opened, file);
    reader = std::move(opened);
    return *reader;
  }

  void check_entries(const SafetensorsReader& reader, std::size_t file) const {
    for (const auto& tensor : manifest.tensors) {
      for (const auto& piece : tensor.pieces) {
        if (piece.file != file) continue;
        const SafetensorsEntry& entry = reader.at(piece.key);
        if (entry.dtype != tensor.dtype || !(entry.shape == piece.slice.shape) ||
            entry.begin != piece.begin || entry.end != piece.end)
          bad_file(reader.path(), "tensor '" + piece.key + "'", "file and manifest disagree about it",
                   kUseAnother);
      }
    }
  }

  /// Reads chunk `index` of a piece and checks it.
  void read_chunk(const Manifest::Tensor& tensor, const Manifest::Piece& piece, std::size_t index,
                  std::span<std::byte> out) const {
    const SafetensorsReader& reader = open(piece.file);
    const std::uint64_t offset = index * manifest.chunk_bytes;
    reader.read_file(piece.begin + offset, out);
    if (on_progress) on_progress();
    if (crc_of(out) != piece.crc32[index])
      bad_file(reader.path(), "tensor '" + tensor.name + "'",
               detail::concat("bytes ", piece.begin + offset, " to ", piece.begin + offset + out.size(),
                              " do not match their checksum"),
               kUseAnother);
  }

  struct Chunk {
    const Manifest::Tensor* tensor;
    const Manifest::Piece* piece;
    std::size_t index;
  };
  std::vector<Chunk> share(int part, int parts) const;

  std::size_t bytes_of_chunk(const Manifest::Piece& piece, std::size_t index) const {
    const std::uint64_t begin = index * manifest.chunk_bytes;
    return std::min(manifest.chunk_bytes, piece.end - piece.begin - begin);
  }

  void read_piece(const Manifest::Tensor& tensor, const Manifest::Piece& piece, const TensorSlice& target,
                  const TensorSlice& box, std::span<std::byte> out) const;
};

/// All chunks in a row, file after file, are cut into `parts` ranges of about equal size. Ranks write one
/// kind of file after the other, each rank its own: so every `parts`-th file comes together.
std::vector<CheckpointReader::Impl::Chunk> CheckpointReader::Impl::share(int part, int parts) const {
  struct Placed {
    std::size_t turn, file;
    std::uint64_t begin, bytes;
    Chunk chunk;
  };
  std::vector<Placed> chunks;
  std::uint64_t total = 0;
  for (const auto& tensor : manifest.tensors) {
    for (const auto& piece : tensor.pieces) {
      for (std::size_t i = 0; i < piece.crc32.size(); ++i) {
        const std::uint64_t bytes = bytes_of_chunk(piece, i);
        chunks.push_back({piece.file % static_cast<std::size_t>(parts),
                          piece.file,
                          piece.begin + i * manifest.chunk_bytes,
                          bytes,
                          {&tensor, &piece, i}});
        total += bytes;
      }
    }
  }
  std::sort(chunks.begin(), chunks.end(), [](const Placed& a, const Placed& b) {
    return std::tie(a.turn, a.file, a.begin) < std::tie(b.turn, b.file, b.begin);
  });
  std::vector<Chunk> own;
  std::uint64_t before = 0;
  for (const Placed& each : chunks) {
    // A chunk belongs to the range that its first byte is in.
    const auto owner =
        static_cast<std::uint64_t>(static_cast<double>(before) / static_cast<double>(total) * parts);
    if (std::min<std::uint64_t>(owner, static_cast<std::uint64_t>(parts) - 1) ==
        static_cast<std::uint64_t>(part))
      own.push_back(each.chunk);
    before += each.bytes;
  }
  return own;
}

/// Whole chunks go straight to their place; of the others, the current one is kept while runs need it.
void CheckpointReader::Impl::read_piece(const Manifest::Tensor& tensor, const Manifest::Piece& piece,
                                        const TensorSlice& target, const TensorSlice& box,
                                        std::span<std::byte> out) const {
  std::vector<std::byte> chunk;
  std::size_t current = SIZE_MAX;
  for_each_run(piece.slice, target, box, size_of(tensor.dtype),
               [&](std::uint64_t from, std::uint64_t to, std::uint64_t bytes) {
                 while (bytes > 0) {
                   const std::size_t index = from / manifest.chunk_bytes;
                   const std::size_t chunk_bytes = bytes_of_chunk(piece, index);
                   const std::uint64_t inside = from - index * manifest.chunk_bytes;
                   const std::uint64_t part = std::min<std::uint64_t>(bytes, chunk_bytes - inside);
                   if (part == chunk_bytes) {
                     read_chunk(tensor, piece, index, out.subspan(to, part));
                   } else {
                     if (current != index) {
                       chunk.resize(chunk_bytes);
                       read_chunk(tensor, piece, index, chunk);
                       current = index;
                     }
                     std::copy_n(chunk.begin() + static_cast<std::ptrdiff_t>(inside), part,
                                 out.begin() + static_cast<std::ptrdiff_t>(to));
                   }
                   from += part;
                   to += part;
                   bytes -= part;
                 }
               });
}

CheckpointReader::CheckpointReader(const fs::path& dir, std::function<void()> on_progress)
    : impl_(std::make_unique<Impl>()) {
  impl_->dir = dir;
  impl_->on_progress = std::move(on_progress);
  std::error_code error;
  if (!fs::is_directory(dir, error)) bad_file(dir, "", "there is no such folder", "Check the path.");
  impl_->manifest = read_manifest(dir / kManifestName);
  impl_->open_files.resize(impl_->manifest.files.size());
  impl_->check_sizes();
}

CheckpointReader::~CheckpointReader() = default;
CheckpointReader::CheckpointReader(CheckpointReader&&) noexcept = default;

const fs::path& CheckpointReader::dir() const { return impl_->dir; }
const Manifest& CheckpointReader::manifest() const { return impl_->manifest; }

const Manifest::Tensor* CheckpointReader::find(std::string_view name) const {
  const auto& tensors = impl_->manifest.tensors;
  const auto it = std::lower_bound(
      tensors.begin(), tensors.end(), name,
      [](const Manifest::Tensor& tensor, std::string_view key) { return tensor.name < key; });
  return it != tensors.end() && it->name == name ? &*it : nullptr;
}

void CheckpointReader::read(std::string_view name, std::span<std::byte> out) const {
  const Manifest::Tensor* tensor = find(name);
  read(name, tensor ? TensorSlice::whole(tensor->shape) : TensorSlice{}, out);
}

void CheckpointReader::read(std::string_view name, const TensorSlice& slice, std::span<std::byte> out) const {
  const Manifest::Tensor* tensor = find(name);
  if (!tensor)
    bad_file(impl_->dir, "tensor '" + std::string(name) + "'", "is not in this checkpoint",
             "It was saved from another model or optimizer; use the configuration it was saved with.");
  check_slice(tensor->name, tensor->shape, slice);
  const std::size_t bytes = static_cast<std::size_t>(slice.shape.numel()) * size_of(tensor->dtype);
  TESSERA_CHECK(out.size() == bytes, "tensor '", name, "': ", bytes, " bytes to read into a buffer of ",
                out.size());
  for (const auto& piece : tensor->pieces) {
    if (const auto box = intersect(piece.slice, slice)) impl_->read_piece(*tensor, piece, slice, *box, out);
  }
}

std::vector<std::string> CheckpointReader::verify() const { return verify(0, 1); }

std::vector<std::string> CheckpointReader::verify(int part, int parts) const {
  TESSERA_CHECK(parts >= 1 && part >= 0 && part < parts, "share ", part, " of ", parts);
  std::vector<std::string> problems;
  std::vector<std::byte> chunk;
  std::vector<char> state(impl_->manifest.files.size(), 0);  // 1: opened, 2: cannot be
  const auto can_open = [&](std::size_t file) {
    if (state[file] != 0) return state[file] == 1;
    try {
      impl_->open(file);
      state[file] = 1;
    } catch (const Error& error) {
      state[file] = 2;
      problems.emplace_back(error.what());
    }
    return state[file] == 1;
  };
  for (std::size_t i = 0; i < state.size(); ++i) {  // a file without a tensor is somebody's too
    if (static_cast<int>(i % static_cast<std::size_t>(parts)) == part) can_open(i);
  }
  for (const Impl::Chunk& place : impl_->share(part, parts)) {
    if (!can_open(place.piece->file)) continue;
    try {
      chunk.resize(impl_->bytes_of_chunk(*place.piece, place.index));
      impl_->read_chunk(*place.tensor, *place.piece, place.index, chunk);
    } catch (const Error& error) {
      problems.emplace_back(error.what());
    }
  }
  return problems;
}

std::vector<std::string> verify_checkpoint(const fs::path& dir) {
  try {
    return CheckpointReader(dir).verify();
  } catch (const Error& error) {
    return {error.what()};
  }
}

CheckpointSummary inspect_checkpoint(const fs::path& dir) {
  const CheckpointReader reader(dir);
  CheckpointSummary summary{.dir = dir, .manifest = reader.manifest(), .bytes = 0, .groups = {}};
  for (const auto& file : summary.manifest.files) summary.bytes += file.bytes;
  for (const auto& tensor : summary.manifest.tensors) {
    const std::string prefix = tensor.name.substr(0, tensor.name.find('.'));
    auto it = std::find_if(summary.groups.begin(), summary.groups.end(),
                           [&](const CheckpointSummary::Group& group) { return group.prefix == prefix; });
    if (it == summary.groups.end()) it = summary.groups.insert(it, {prefix, 0, 0, 0});
    it->tensors += 1;
    it->elements += tensor.shape.numel();
    it->bytes += static_cast<std::uint64_t>(tensor.shape.numel()) * size_of(tensor.dtype);
  }
  return summary;
}

}  // namespace tessera
