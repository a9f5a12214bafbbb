#pragma once
/// HostCopy: a tensor's bytes on their way to the host, read when they are needed.

#include <cstring>
#include <memory>

#include "tessera/tensor/tensor.hpp"

namespace tessera {

/// Takes its place in the stream when made; the host goes on. Copies share the bytes.
class HostCopy {
 public:
  /// Of nothing: done, value() is zero.
  HostCopy() = default;
  /// An undefined tensor is nothing. Errors: InvalidArgument unless contiguous.
  HostCopy(const ExecCtx& ctx, const Tensor& source);

  /// The first bytes as a T, zero if there are none. Waits for them. Errors: InvalidArgument if T is larger,
  /// and for a copy of a tensor on meta, which may be made.
  template <typename T>
  T value(const Tensor::Where& where = Tensor::Where::current()) const {
    T result{};
    detail::check_readable(device_, where);
    if (memory_ == nullptr) return result;
    TESSERA_CHECK(sizeof(T) <= bytes_, "a copy of ", bytes_, " bytes has no value of ", sizeof(T));
    arrived_.synchronize();
    std::memcpy(&result, memory_.get(), sizeof(T));
    return result;
  }

 private:
  std::shared_ptr<void> memory_;
  std::size_t bytes_ = 0;
  Event arrived_;
  Device device_;  ///< of the source
};

}  // namespace tessera
