#pragma once
/// A look-alike of the part of the CUDA driver that Tessera uses: loading of kernels. There is one module,
/// and its only function stands for all kernels.

using CUfunction = struct CUfunc_st*;
using CUmodule = struct CUmod_st*;
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
