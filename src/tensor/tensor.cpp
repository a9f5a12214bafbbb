#include "tessera/tensor/tensor.hpp"

#include <algorithm>
#include <cstring>

namespace tessera {

void detail::check_readable(const Device& device, const std::source_location& where) {
  if (!device.is_meta()) return;
  detail::fail<InvalidArgument>(where.file_name(), static_cast<int>(where.line()), "",
                                "values were asked for of a tensor on the meta device, where nothing is "
                                "computed: only a run on a real device has them");
}

Storage::Storage(std::shared_ptr<CachingAllocator> allocator, std::size_t bytes)
    : data_(static_cast<std::byte*>(allocator->allocate(bytes))),
      bytes_(bytes),
      allocator_(std::move(allocator)) {}

Storage::Storage(void* data, std::size_t bytes, std::shared_ptr<void> owner)
    : data_(static_cast<std::byte*>(data)), bytes_(bytes), owner_(std::move(owner)) {}

Storage::~Storage() {
  if (allocator_) allocator_->release(data_);
}

Tensor Tensor::empty(const ExecCtx& ctx, Shape shape, DType dtype) {
  Tensor t;
  t.shape_ = shape;
  t.strides_ = shape.contiguous_strides();
  t.dtype_ = dtype;
  t.device_ = ctx.device();
  t.storage_ =
      std::make_shared<Storage>(ctx.allocator, static_cast<std::size_t>(shape.numel()) * size_of(dtype));
  return t;
}

Tensor Tensor::wrap(void* data, Shape shape, DType dtype, std::shared_ptr<void> owner) {
  Tensor t;
  t.shape_ = shape;
  t.strides_ = shape.contiguous_strides();
  t.dtype_ = dtype;
  t.storage_ = std::make_shared<Storage>(data, static_cast<std::size_t>(shape.numel()) * size_of(dtype),
                                         std::move(owner));
  return t;
}

bool Tensor::is_contiguous() const {
  std::int64_t step = 1;
  for (int i = rank() - 1; i >= 0; --i) {
    if (shape_[i] != 1 && strides_[i] != step) return false;
    step *= shape_[i];
  }
  return true;
}

Tensor Tensor::view(std::initializer_list<std::int64_t> dims) const {
  std::int64_t known = 1;
  int open = -1;
  std::vector<std::int64_t> sizes(dims);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == -1) {
      TESSERA_CHECK(open < 0, "only one dimension of a view may be -1");
      open = static_cast<int>(i);
    } else {
      known *= sizes[i];
    }
  }
  if (open >= 0) {
    TESSERA_CHECK(known > 0 && numel() % known == 0, "cannot view ", shape_, " with ", known,
                  " elements per open row");
    sizes[static_cast<std::size_t>(open)] = numel() / known;
  }
  return view(Shape(std::span<const std::int64_t>(sizes)));
}

Tensor Tensor::view(const Shape& shape) const {
  TESSERA_CHECK_EQ(shape.numel(), numel(), "view of ", shape_, " as ", shape);
  TESSERA_CHECK(is_contiguous(),
                "only a contiguous tensor can be viewed under another shape; this one has shape ", shape_,
                " and strides ", strides_);
  Tensor t = *this;
  t.shape_ = shape;
  t.strides_ = shape.contiguous_strides();
  return t;
}

Tensor Tensor::narrow(int dim, std::int64_t begin, std::int64_t count) const {
  TESSERA_CHECK(begin >= 0 && count >= 0 && begin + count <= shape_[dim], "elements [", begin, ", ",
                begin + count, ") of dimension ", dim, " of shape ", shape_);
  Tensor t = *this;
  t.offset_ += begin * strides_[dim];
  t.shape_[dim] = count;
  return t;
}

Tensor Tensor::transpose(int dim0, int dim1) const {
  Tensor t = *this;
  std::swap(t.shape_[dim0], t.shape_[dim1]);
  std::swap(t.strides_[dim0], t.strides_[dim1]);
  return t;
}

Tensor Tensor::reinterpret(DType dtype) const {
  TESSERA_CHECK(is_contiguous() && rank() >= 1, "only a contiguous tensor can be read as another dtype");
  const std::size_t old_size = size_of(dtype_), new_size = size_of(dtype);
  const auto row = static_cast<std::size_t>(size(-1)) * old_size;
  TESSERA_CHECK(row % new_size == 0 && offset_ * old_size % new_size == 0, "a row of ", row,
                " bytes from element ", offset_, " of ", dtype_, " is not made of whole ", dtype);
  Tensor t = *this;
  t.dtype_ = dtype;
  t.offset_ = static_cast<std::int64_t>(static_cast<std::size_t>(offset_) * old_size / new_size);
  t.shape_[rank() - 1] = static_cast<std::int64_t>(row / new_size);
  t.strides_ = t.shape_.contiguous_strides();
  return t;
}

void Tensor::copy_from_host(const void* source) const {
  TESSERA_CHECK(is_contiguous(), "host copies need a contiguous tensor, strides are ", strides_);
  if (numel() == 0) return;
  if (auto* allocator = storage_->allocator()) return allocator->copy_from_host(raw(), source, nbytes());
  std::memcpy(raw(), source, nbytes());
}

void Tensor::copy_to_host(void* target, const Where& where) const {
  detail::check_readable(device_, where);
  TESSERA_CHECK(is_contiguous(), "host copies need a contiguous tensor, strides are ", strides_);
  if (numel() == 0) return;
  if (auto* allocator = storage_->allocator()) return allocator->copy_to_host(target, raw(), nbytes());
  std::memcpy(target, raw(), nbytes());
}

Tensor Tensor::to_host(const Where& where) const {
  if (device_.is_cpu()) return *this;
  detail::check_readable(device_, where);
  const std::shared_ptr<std::byte[]> memory(new std::byte[std::max<std::size_t>(nbytes(), 1)]);
  copy_to_host(memory.get(), where);
  return wrap(memory.get(), shape_, dtype_, memory);
}

std::vector<float> Tensor::to_floats(const Where& where) const {
  detail::check_readable(device_, where);
  std::vector<float> values(static_cast<std::size_t>(numel()));
  visit_float(dtype_, "to_floats", [&](auto tag) {
    const auto source = to_vector<decltype(tag)>(where);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(source[i]);
  });
  return values;
}

}  // namespace tessera
