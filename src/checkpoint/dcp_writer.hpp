#pragma once
/// Writes folders of PyTorch's distributed checkpoint: one file of tensors, and `.metadata` that says what is
/// where.

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/torch_file.hpp"
#include "tessera/checkpoint/safetensors.hpp"

namespace tessera::checkpoint_detail {

class DcpWriter {
 public:
  using Append = std::function<void(std::span<const std::byte>)>;

  /// Errors of all members: IoError.
  explicit DcpWriter(std::filesystem::path folder);
  /// A part of a tensor, whose bytes `body` hands over. All parts of a tensor give its whole shape.
  void add(const TensorSpec& whole, const TensorSlice& part, const std::function<void(const Append&)>& body);
  /// Anything but a tensor, as torch.save would write it.
  void add_blob(const std::string& name, TorchPickle value);
  /// Writes `.metadata`. `key`: of the dict that all names begin with, "" where they are in none; nothing:
  /// the checkpoint does not say how names were nested.
  void finish(const std::optional<std::string>& key);

 private:
  struct Place {
    std::uint64_t offset = 0, bytes = 0;
  };
  struct Entry {
    std::string name;
    std::optional<TensorSpec> tensor;  ///< nothing: a blob
    std::vector<TensorSlice> boxes;    ///< of a tensor's parts
    std::vector<Place> places;         ///< of each part, or of the blob
  };
  Entry& entry(const std::string& name);
  Place write(TorchPickle pickle, const WriteStorage& body);

  std::filesystem::path folder_;
  ZipWriter file_;
  std::vector<Entry> entries_;
  std::unordered_map<std::string, std::size_t> index_;
};

}  // namespace tessera::checkpoint_detail
