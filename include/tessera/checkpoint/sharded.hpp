#pragma once
/// Model weights in one safetensors file or in several with an index, in Hugging Face's layout.

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/safetensors.hpp"

namespace tessera {

/// Reads model.safetensors, or the files that model.safetensors.index.json names.
class ShardedReader {
 public:
  /// Opens every file of the folder's weights. File names in the index must be plain names of files in this
  /// folder. Errors: CheckpointError naming file and entry; IoError.
  explicit ShardedReader(const std::filesystem::path& dir,
                         SymbolicLinks links = SymbolicLinks::within_folder);
  ~ShardedReader();
  ShardedReader(ShardedReader&&) noexcept;
  ShardedReader& operator=(ShardedReader&&) noexcept;

  const std::filesystem::path& dir() const;
  /// Entries of all files, file by file.
  const std::vector<SafetensorsEntry>& entries() const;
  const SafetensorsEntry* find(std::string_view name) const;
  /// Base name of the file that holds a tensor. Errors: CheckpointError if none does.
  const std::string& file_of(std::string_view name) const;
  /// Base names of the weight files.
  std::vector<std::string> files() const;
  /// The `__metadata__` of one of files().
  const std::map<std::string, std::string>& metadata_of(const std::string& file) const;
  /// The index's `metadata` object as JSON text; "" when there is no index.
  const std::string& index_metadata() const;
  bool has_index() const;

  void read(std::string_view name, std::span<std::byte> out) const;
  void read_slice(std::string_view name, const TensorSlice& slice, std::span<std::byte> out) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Writes weights into one or several files; tensors arrive in any order, in as many appends as the caller
/// likes.
class ShardedWriter {
 public:
  struct Options {
    std::uint64_t max_shard_bytes = 5'000'000'000;
    /// Tensor name → file base name, to write a known layout again; empty = split by size in the given order.
    std::map<std::string, std::string> layout;
    /// `__metadata__` of every file.
    std::map<std::string, std::string> metadata = {{"format", "pt"}};
    /// `__metadata__` of single files, instead of `metadata`.
    std::map<std::string, std::map<std::string, std::string>> file_metadata;
    /// JSON object whose members the index's metadata takes over (total_size is always computed).
    std::string index_metadata;
    /// Write an index although there is only one file.
    bool force_index = false;
  };

  ShardedWriter(const std::filesystem::path& dir, std::span<const TensorSpec> tensors, Options options);
  ShardedWriter(const std::filesystem::path& dir, std::span<const TensorSpec> tensors);
  ~ShardedWriter();

  /// Appends the next bytes of a tensor. A file is synced and renamed into place as soon as it is complete.
  void append(std::string_view name, std::span<const std::byte> bytes);
  /// Writes the index where there are several files. Errors: InvalidArgument if a tensor lacks bytes;
  /// IoError.
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
