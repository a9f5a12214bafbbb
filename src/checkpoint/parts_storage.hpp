#pragma once
/// Tensors that lie in parts, as ranks of other programs leave them behind: boxes of a tensor, or stretches
/// of its elements in a row.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/hf_storage.hpp"
#include "checkpoint/torch_file.hpp"
#include "tessera/base/families.hpp"

namespace tessera::checkpoint_detail {

/// Elements [first, first + count) of a box of a tensor, in row-major order.
struct TensorPart {
  TensorSlice box;
  std::int64_t first = 0, count = 0;
  /// Reads elements of the part from `element` on. May be called from several threads.
  std::function<void(std::int64_t element, std::span<std::byte> out)> read;
};

struct PartedTensor {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  std::vector<TensorPart> parts;
};

/// Elements of a tensor of a file, from `base` on, as TensorPart::read takes them. What is not contiguous is
/// read whole.
std::function<void(std::int64_t, std::span<std::byte>)> elements_of(std::shared_ptr<const TorchFile> file,
                                                                    TorchTensor tensor,
                                                                    std::int64_t base = 0);
/// A tensor of a file as one part. Errors: CheckpointError where it has more dimensions than a Shape.
PartedTensor whole_tensor(const std::string& name, const std::shared_ptr<const TorchFile>& file,
                          const TorchTensor& tensor);
/// The Shape of so many dimensions. Errors: CheckpointError naming `origin` and `name`.
Shape shape_of(const std::vector<std::int64_t>& dims, const std::filesystem::path& origin,
               const std::string& name);

/// All of them under their own names. Errors: CheckpointError naming `origin`: two have one name, parts that
/// lie outside of their tensor, overlap or leave something out.
std::unique_ptr<HfStorage> parts_of(std::vector<PartedTensor> tensors, const std::filesystem::path& origin);

/// What of them is the model's, under its names: without what programs put before them ("model.",
/// "app.model."; it is what stands before the embedding's) and between (names of wrapping modules). What is
/// left out is said in `notes`. Errors: CheckpointError naming `origin`: none of them is the embedding, two
/// have one name, parts that lie outside of their tensor, overlap or leave something out.
std::unique_ptr<HfStorage> parts_of(std::vector<PartedTensor> tensors, const ModelSpec& spec,
                                    const std::filesystem::path& origin, std::vector<std::string>& notes);

}  // namespace tessera::checkpoint_detail
