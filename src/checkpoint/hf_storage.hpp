#pragma once
/// Where a model's tensors are read from, under Hugging Face's names: files, or the caller's memory.

#include <memory>

#include "tessera/checkpoint/hf.hpp"
#include "tessera/checkpoint/safetensors.hpp"

namespace tessera::checkpoint_detail {

class HfStorage {
 public:
  virtual ~HfStorage() = default;
  /// What there is; begin and end mean nothing.
  virtual const std::vector<SafetensorsEntry>& entries() const = 0;
  /// The entry, or null.
  virtual const SafetensorsEntry* find(std::string_view name) const = 0;
  /// Reads a box into a contiguous `out`.
  virtual void read_slice(std::string_view name, const TensorSlice& slice,
                          std::span<std::byte> out) const = 0;
  /// Whether all of it may be read without a thought.
  virtual bool in_memory() const = 0;
  /// Adds which files hold what.
  virtual void describe(HfSource& source) const = 0;
};

std::unique_ptr<HfStorage> files_of(const std::filesystem::path& dir, SymbolicLinks links);
std::unique_ptr<HfStorage> memory_of(std::vector<TensorView> tensors);
/// What `storage` has under the names of `modules` under those of `files`, which are of the same parameters.
/// What goes by one name in both, or is not there, stays as it is.
std::unique_ptr<HfStorage> as_files(std::unique_ptr<HfStorage> storage, const std::vector<HfMapping>& files,
                                    const std::vector<HfMapping>& modules);

}  // namespace tessera::checkpoint_detail
