#pragma once
/// The safetensors file format: 8 bytes of little-endian header length, a JSON header, the tensors' bytes.
/// A reader that trusts nothing in the file, and a streaming writer that never shows a half-written file.

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tessera/checkpoint/tensor_view.hpp"

namespace tessera {

/// One tensor of a safetensors file; [begin, end) are its bytes, counted from the start of the file.
struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::f32;
  bool is_bool = false;  ///< stored as BOOL; dtype is then u8
  Shape shape;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

/// Whether a file reached through a symbolic link may be opened.
enum class SymbolicLinks {
  refuse,
  follow,
  within_folder  ///< if it ends in the folder that it is in, or in the blobs of Hugging Face's cache
};

/// Reads one file with positioned reads (no mapping, so a file that shrinks is an error and not a signal).
/// Const members may be called from several threads.
class SafetensorsReader {
 public:
  /// Opens the file and checks the whole header against the file's size.
  /// Errors: CheckpointError naming file, tensor and reason; IoError when the system refuses.
  explicit SafetensorsReader(const std::filesystem::path& path, SymbolicLinks links = SymbolicLinks::follow);
  ~SafetensorsReader();
  SafetensorsReader(SafetensorsReader&&) noexcept;
  SafetensorsReader& operator=(SafetensorsReader&&) noexcept;

  const std::filesystem::path& path() const;
  /// Entries in the order of their bytes in the file.
  const std::vector<SafetensorsEntry>& entries() const;
  const std::map<std::string, std::string>& metadata() const;
  /// Bytes before the first tensor: the length word and the header.
  std::uint64_t data_begin() const;
  std::uint64_t file_bytes() const;
  /// The entry, or null.
  const SafetensorsEntry* find(std::string_view name) const;
  /// The entry. Errors: CheckpointError if there is none.
  const SafetensorsEntry& at(std::string_view name) const;

  /// Reads a whole tensor into `out`, which has exactly its size.
  void read(std::string_view name, std::span<std::byte> out) const;
  /// Reads bytes [offset, offset + out.size()) of a tensor.
  void read_bytes(std::string_view name, std::uint64_t offset, std::span<std::byte> out) const;
  /// Reads rows [begin, end) of the first dimension into a contiguous `out`.
  void read_rows(std::string_view name, std::int64_t begin, std::int64_t end, std::span<std::byte> out) const;
  /// Reads a box into a contiguous `out`.
  void read_slice(std::string_view name, const TensorSlice& slice, std::span<std::byte> out) const;
  /// Reads bytes of the file itself, header included.
  void read_file(std::uint64_t offset, std::span<std::byte> out) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// One tensor of a file in memory, of any element type the format has (also those that Tessera computes
/// nothing with) and any number of dimensions up to 64; [begin, end) are its bytes in the file.
struct SafetensorsTensor {
  std::string name;
  std::string_view type;  ///< the format's name: "F32", "F8_E4M3", ...
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};
/// The tensors of a whole file in memory, in the order of their bytes, checked as SafetensorsReader does.
/// Errors: CheckpointError, where `origin` stands for the file.
std::vector<SafetensorsTensor> safetensors_in_memory(std::span<const std::byte> file,
                                                     const std::string& origin);

/// What a finished file looks like, for a manifest.
struct SafetensorsSummary {
  struct Tensor {
    std::string name;
    std::uint64_t begin = 0;  ///< from the start of the file
    std::uint64_t end = 0;
    std::vector<std::uint32_t> crc32;  ///< one per chunk of the tensor's bytes
  };
  std::uint64_t file_bytes = 0;
  std::uint64_t header_bytes = 0;  ///< length word and header
  std::uint32_t header_crc32 = 0;
  std::vector<Tensor> tensors;  ///< in the order of their bytes
};

/// Writes one file: the header first, then every tensor in as many appends as the caller likes, tensors in
/// any order. The file has a temporary name until finish(); a writer destroyed before that removes it.
class SafetensorsWriter {
 public:
  struct Options {
    std::map<std::string, std::string> metadata;
    std::uint64_t chunk_bytes = 0;  ///< compute a CRC-32 for every so many bytes of a tensor; 0 = none
  };

  /// Lays out the file (wide element types first, then by name: the same bytes for the same tensors, whatever
  /// their order). Errors: InvalidArgument for a name twice, empty or reserved; IoError when the file cannot
  /// be made that large.
  SafetensorsWriter(const std::filesystem::path& path, std::span<const TensorSpec> tensors, Options options);
  SafetensorsWriter(const std::filesystem::path& path, std::span<const TensorSpec> tensors);
  ~SafetensorsWriter();
  SafetensorsWriter(SafetensorsWriter&&) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) noexcept;

  /// Appends the next bytes of tensor `name`. Errors: InvalidArgument if that is more than it has; IoError.
  void append(std::string_view name, std::span<const std::byte> bytes);
  /// True when every tensor has all its bytes.
  bool complete() const;
  /// Syncs and renames the file into place. Errors: InvalidArgument if a tensor lacks bytes; IoError.
  SafetensorsSummary finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Bytes of the file these tensors make: length word, header, data.
std::uint64_t safetensors_file_bytes(std::span<const TensorSpec> tensors,
                                     const std::map<std::string, std::string>& metadata = {});

/// "F32", "BF16", ...: the format's name of an element type.
std::string_view safetensors_dtype_name(DType dtype);

}  // namespace tessera
