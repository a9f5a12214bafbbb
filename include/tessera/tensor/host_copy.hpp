#pragma once
/// HostCopy: a tensor's bytes on their way to the host, read when they are needed.

#include <memory>
#include <vector>

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
    read(&result, sizeof(T), where);
    return result;
  }
  /// The first `count` of them.
  template <typename T>
  std::vector<T> values(std::size_t count, const Tensor::Where& where = Tensor::Where::current()) const {
    std::vector<T> result(count);
    read(result.data(), count * sizeof(T), where);
    return result;
  }

 private:
  void read(void* to, std::size_t bytes, const Tensor::Where& where) const;

  std::shared_ptr<void> memory_;
  std::size_t bytes_ = 0;
  Event arrived_;
  Device device_;  ///< of the source
};

}  // namespace tessera
