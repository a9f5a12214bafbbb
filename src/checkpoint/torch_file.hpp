#pragma once
/// Files of torch.save (a zip archive of a pickle and the tensors' storages), read and written without
/// PyTorch.

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/pickle.hpp"
#include "checkpoint/zip_archive.hpp"
#include "tessera/checkpoint/tensor_view.hpp"

namespace tessera::checkpoint_detail {

/// A tensor of such a file: a strided view of one of its storages.
struct TorchTensor {
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape, strides;  ///< any number of dimensions
  std::int64_t offset = 0;                   ///< elements
  const ZipReader::Entry* storage = nullptr;

  std::int64_t numel() const;
  bool is_contiguous() const;
  std::string describe() const;  ///< "float32 [3, 5]"
};

constexpr std::int64_t kMostExtent = std::int64_t{1} << 48;
/// The sizes or offsets that a tuple or list holds: integers from 0 to kMostExtent; nothing where it holds
/// something else.
std::optional<std::vector<std::int64_t>> extents(const PickleValue& value);

/// Of a tensor of such a shape whose elements lie in a row.
std::vector<std::int64_t> contiguous_strides(std::span<const std::int64_t> shape);

/// What tensors are read from.
class TensorHolder {
 public:
  virtual ~TensorHolder() = default;
  /// For messages.
  virtual const std::filesystem::path& path() const = 0;
  virtual void read(const TorchTensor& tensor, std::span<std::byte> out) const = 0;
  /// Reads rows [first, first + count) of the first dimension, contiguous.
  virtual void read_rows(const TorchTensor& tensor, std::int64_t first, std::int64_t count,
                         std::span<std::byte> out) const = 0;
};

class TorchFile final : public TensorHolder {
 public:
  explicit TorchFile(const std::filesystem::path& path, SymbolicLinks links = SymbolicLinks::follow);
  /// The one that is bytes [offset, offset + bytes) of a larger file.
  TorchFile(const std::filesystem::path& path, std::uint64_t offset, std::uint64_t bytes,
            SymbolicLinks links = SymbolicLinks::follow);

  const std::filesystem::path& path() const override { return path_; }
  const PickleValue& root() const { return pickle_->root(); }
  /// The tensor that a value stands for (a parameter's too), or nothing where it is something else. Errors:
  /// CheckpointError where it reaches beyond its storage or has a kind that is not read.
  std::optional<TorchTensor> tensor(const PickleValue& value) const;
  void read_rows(const TorchTensor& tensor, std::int64_t first, std::int64_t count,
                 std::span<std::byte> out) const override;
  void read(const TorchTensor& tensor, std::span<std::byte> out) const override;

 private:
  void open(std::uint64_t begin, std::uint64_t end);
  [[noreturn]] void fail(const std::string& where, const std::string& reason) const;
  void read_run(const TorchTensor& tensor, std::int64_t element, std::span<std::byte> out) const;

  std::filesystem::path path_;
  File file_;
  std::optional<ZipReader> zip_;
  std::string folder_;  // of the archive
  std::optional<Pickle> pickle_;
};

/// Writes the pickle of a file: plain values, and tensors whose bytes come later. Made from these templates
/// only.
class TorchPickle {
 public:
  TorchPickle();
  TorchPickle& none();
  TorchPickle& boolean(bool value);
  TorchPickle& integer(std::int64_t value);
  TorchPickle& real(double value);
  TorchPickle& text(std::string_view value);
  /// torch.float32 and the like.
  TorchPickle& dtype(DType value);
  TorchPickle& tensor(DType dtype, const Shape& shape);
  TorchPickle& begin_list();
  TorchPickle& end_list();
  TorchPickle& begin_dict();
  TorchPickle& end_dict();
  /// A types.SimpleNamespace of what is written until end_namespace, names and values in turn.
  TorchPickle& begin_namespace();
  TorchPickle& end_namespace();
  TorchPickle& begin_tuple();
  TorchPickle& end_tuple();
  /// A torch.Size.
  TorchPickle& size(const Shape& shape);
  /// An object of one of torch.distributed.checkpoint's classes with the attributes that are written until
  /// end_object, names and values in turn.
  TorchPickle& begin_object(std::string_view module, std::string_view name);
  TorchPickle& end_object();
  /// What torch.distributed.checkpoint says of a plain tensor beside its shape.
  TorchPickle& tensor_properties(DType dtype);

  struct Storage {
    DType dtype;
    std::uint64_t bytes;
  };
  /// Of its tensors, in the order in which they were written.
  const std::vector<Storage>& storages() const { return storages_; }
  /// Of all of them.
  std::uint64_t storage_bytes() const;
  /// The whole pickle; nothing may follow.
  std::string finish();

 private:
  TorchPickle& put(std::string_view code);
  TorchPickle& global(std::string_view module, std::string_view name);
  std::string bytes_;
  std::vector<Storage> storages_;
};

/// `write(i, append)` hands over the bytes of storage i, in as many pieces as it likes.
using WriteStorage =
    std::function<void(std::size_t, const std::function<void(std::span<const std::byte>)>& append)>;
/// Writes a file. Synced. Errors: IoError.
void write_torch_file(const std::filesystem::path& path, TorchPickle pickle, const WriteStorage& write);
/// The same as the next archive of a file; `name`: of the folder in it. Returns its bytes.
std::uint64_t write_torch_archive(ZipWriter& zip, const std::string& name, TorchPickle pickle,
                                  const WriteStorage& write);

}  // namespace tessera::checkpoint_detail
