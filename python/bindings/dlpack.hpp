#pragma once
/// Tensors that share their memory with other libraries by DLPack: torch.from_dlpack(tensor), and back.

#include <pybind11/pybind11.h>

#include "tessera/device/exec_ctx.hpp"
#include "tessera/tensor/tensor.hpp"

namespace tessera::bindings {

/// What Python gets of a contiguous tensor whose work on ctx.stream is done: a NumPy array of host memory, a
/// `Tensor` with __dlpack__ of a GPU's; None for no tensor. It keeps the memory alive.
pybind11::object shared_of(const ExecCtx& ctx, const Tensor& tensor);

/// What Python gives, on ctx's device: a NumPy array or anything with __dlpack__. Its own memory where that
/// is the host's and `ctx` is on the CPU, otherwise a copy, finished when this returns. Errors:
/// InvalidArgument for anything else, for memory that is not contiguous or lies on another device than the
/// CPU and ctx's, and for dtypes Tessera has not.
Tensor tensor_from(const ExecCtx& ctx, const pybind11::object& object);

}  // namespace tessera::bindings
