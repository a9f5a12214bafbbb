#pragma once
/// NumPy arrays and Tessera's host tensors, sharing memory.

#include <pybind11/numpy.h>

#include <vector>

#include "tessera/tensor/tensor.hpp"

namespace tessera::bindings {

/// The array's memory as a host tensor, kept alive by it. Errors: InvalidArgument for an array that is not
/// C-contiguous and aligned, or whose dtype is none of float32, float64, int32, int64 and uint8.
Tensor tensor_of(const pybind11::array& array);
/// A host tensor's memory as an array, kept alive by it; a copy of what lies on a GPU. None for no tensor.
pybind11::object array_of(const Tensor& tensor);
/// An array of any integer dtype as int32 values in row-major order.
/// Errors: InvalidArgument for values outside int32 or an array that does not hold integers.
std::vector<std::int32_t> integers_of(const pybind11::array& array, const char* name);
Shape shape_of(const pybind11::array& array);

}  // namespace tessera::bindings
