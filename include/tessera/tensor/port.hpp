#pragma once
/// Ports: what crosses a boundary between two pieces of a model, value by value.

#include <string>
#include <vector>

#include "tessera/tensor/tensor.hpp"

namespace tessera {

/// One value that a piece gives to the next. Its gradient comes back in the same shape and dtype.
struct Port {
  Shape shape;
  DType dtype = DType::f32;
  std::string name;  ///< unique at its boundary

  std::int64_t bytes() const { return shape.numel() * static_cast<std::int64_t>(size_of(dtype)); }
};

/// Memory for what crosses, port by port.
inline std::vector<Tensor> empty_tensors(const ExecCtx& ctx, const std::vector<Port>& ports) {
  std::vector<Tensor> tensors;
  for (const Port& port : ports) tensors.push_back(Tensor::empty(ctx, port.shape, port.dtype));
  return tensors;
}

}  // namespace tessera
