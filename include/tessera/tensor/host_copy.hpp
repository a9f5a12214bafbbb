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

  /// The first bytes as a T, zero if there are none. Waits for them. Errors: InvalidArgument if T is larger.
  template <typename T>
  T value() const {
    T result{};
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
};

}  // namespace tessera
