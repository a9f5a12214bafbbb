#pragma once
/// Tensor: shared storage with shape, strides and dtype. Views only: no maths, no graph.

#include <cstddef>
#include <memory>
#include <source_location>
#include <span>
#include <utility>
#include <vector>

#include "tessera/base/dtype.hpp"
#include "tessera/base/shape.hpp"
#include "tessera/device/exec_ctx.hpp"

namespace tessera {

namespace detail {
/// Errors: InvalidArgument, naming the place that asks, for values on meta.
void check_readable(const Device& device, const std::source_location& where);
}  // namespace detail

/// Memory that returns to its allocator with its last tensor, or is somebody else's (kept alive by `owner`).
class Storage {
 public:
  Storage(std::shared_ptr<CachingAllocator> allocator, std::size_t bytes);
  Storage(void* data, std::size_t bytes, std::shared_ptr<void> owner);
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  /// Whether the memory is an allocator's, and so nobody else's.
  bool owned() const { return allocator_ != nullptr; }
  CachingAllocator* allocator() const { return allocator_.get(); }

 private:
  std::byte* data_;
  std::size_t bytes_;
  std::shared_ptr<CachingAllocator> allocator_;
  std::shared_ptr<void> owner_;
};

class Tensor {
 public:
  /// Undefined: no storage. Tests false.
  Tensor() = default;
  /// Uninitialised, contiguous, from the context's allocator.
  static Tensor empty(const ExecCtx& ctx, Shape shape, DType dtype);
  /// Memory of somebody else, contiguous; `owner` (may be null) is held as long as a tensor refers to it.
  static Tensor wrap(void* data, Shape shape, DType dtype, std::shared_ptr<void> owner = nullptr);
  /// A copy of host values.
  template <typename T>
  static Tensor from(const ExecCtx& ctx, std::span<const T> values, Shape shape) {
    TESSERA_CHECK_EQ(static_cast<std::int64_t>(values.size()), shape.numel(), "values for a tensor of shape ",
                     shape);
    Tensor t = empty(ctx, shape, dtype_of<T>::value);
    t.copy_from_host(values.data());
    return t;
  }
  template <typename T>
  static Tensor from(const ExecCtx& ctx, const std::vector<T>& values, Shape shape) {
    return from(ctx, std::span<const T>(values), shape);
  }

  explicit operator bool() const { return storage_ != nullptr; }
  const Shape& shape() const { return shape_; }
  const Shape& strides() const { return strides_; }
  std::int64_t size(int dim) const { return shape_[dim]; }
  int rank() const { return shape_.rank(); }
  std::int64_t numel() const { return shape_.numel(); }
  std::size_t nbytes() const { return static_cast<std::size_t>(numel()) * size_of(dtype_); }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  bool is_contiguous() const;
  /// True if no other tensor or view refers to this storage: its memory may be overwritten by whoever holds
  /// it. Never true of wrapped memory, which somebody else may still read.
  bool is_unique() const { return storage_.use_count() == 1 && storage_->owned(); }

  void* raw() const { return storage_ ? storage_->data() + offset_ * size_of(dtype_) : nullptr; }
  /// Errors: InvalidArgument if T is not the element type.
  template <typename T>
  T* data() const {
    TESSERA_CHECK(dtype_of<T>::value == dtype_, "tensor holds ", dtype_, ", not ", dtype_of<T>::value);
    return static_cast<T*>(raw());
  }

  /// Same elements under another shape; one dimension may be -1. Errors: InvalidArgument unless contiguous
  /// and equal in number.
  Tensor view(std::initializer_list<std::int64_t> dims) const;
  Tensor view(const Shape& shape) const;
  /// Elements [begin, begin + count) of dimension `dim`.
  Tensor narrow(int dim, std::int64_t begin, std::int64_t count) const;
  Tensor transpose(int dim0, int dim1) const;

  /// The same bytes as elements of another dtype, along the last dimension. Errors: InvalidArgument unless
  /// contiguous, and its bytes make whole elements.
  Tensor reinterpret(DType dtype) const;

  /// Who asks for values, for messages.
  using Where = std::source_location;
  /// Copies numel() elements from/to host memory, in the order of the stream the memory was allocated for.
  /// Contiguous tensors only. On the CPU the caller has synchronised the stream. On meta there is nothing to
  /// write to. Errors: InvalidArgument, naming the caller's place, for values of a tensor on meta; so do all
  /// that give values.
  void copy_from_host(const void* source) const;
  void copy_to_host(void* target, const Where& where = Where::current()) const;
  /// The tensor itself if it is on the CPU, else a copy there. Contiguous tensors only.
  Tensor to_host(const Where& where = Where::current()) const;
  template <typename T>
  std::vector<T> to_vector(const Where& where = Where::current()) const {
    TESSERA_CHECK(dtype_of<T>::value == dtype_, "tensor holds ", dtype_, ", not ", dtype_of<T>::value);
    detail::check_readable(device_, where);
    std::vector<T> values(static_cast<std::size_t>(numel()));
    copy_to_host(values.data(), where);
    return values;
  }
  /// Values as float, whatever the float dtype. Contiguous tensors only.
  std::vector<float> to_floats(const Where& where = Where::current()) const;

 private:
  std::shared_ptr<Storage> storage_;
  std::int64_t offset_ = 0;
  Shape shape_, strides_;
  DType dtype_ = DType::f32;
  Device device_;
};

}  // namespace tessera
