#pragma once
/// What a checkpoint contains, as written in its manifest.json: the proof that it is whole.

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/tensor_view.hpp"

namespace tessera {

/// Everything of a run that is no tensor. The JSON members are texts holding one JSON value each.
struct CheckpointState {
  std::int64_t step = 0;
  std::int64_t consumed_samples = 0;
  std::string tessera_version;  ///< filled in by save
  std::string config_json = "{}";
  std::string rng_json = "null";
  std::string data_json = "null";
  std::string user_json = "null";
  std::string run = "";  ///< identity of the run it belongs to; "" where nobody gave one
};

struct Manifest {
  struct File {
    std::string name;
    std::uint64_t bytes = 0;
    std::uint64_t header_bytes = 0;
    std::uint32_t header_crc32 = 0;
  };
  /// A box of a tensor as one contiguous range of one file.
  struct Piece {
    std::size_t file = 0;  ///< index into `files`
    std::string key;       ///< the name it has inside the safetensors file
    TensorSlice slice;
    std::uint64_t begin = 0;  ///< byte range, from the start of the file
    std::uint64_t end = 0;
    std::vector<std::uint32_t> crc32;  ///< one per chunk_bytes of the range
  };
  struct Tensor {
    std::string name;
    DType dtype = DType::f32;
    Shape shape;  ///< of the whole tensor
    std::string placement;
    std::vector<Piece> pieces;  ///< cover the tensor exactly once
  };

  CheckpointState state;
  std::uint64_t chunk_bytes = 0;
  std::vector<File> files;
  std::vector<Tensor> tensors;  ///< sorted by name
};

/// Reads and checks a manifest: every field, its own checksum, and that the pieces of every tensor cover it
/// exactly once. Errors: CheckpointError naming file and JSON path; IoError.
Manifest read_manifest(const std::filesystem::path& path);
/// The same from text; `origin` names it in messages.
Manifest parse_manifest(std::string_view text, const std::string& origin);
/// As it is written to a file. Errors: InvalidArgument for text that is not JSON or UTF-8.
std::string to_json(const Manifest& manifest);
/// Writes it under a temporary name, synced and renamed. Errors: InvalidArgument for text that is not JSON or
/// UTF-8; IoError.
void write_manifest(const Manifest& manifest, const std::filesystem::path& path);

}  // namespace tessera
