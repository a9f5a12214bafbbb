#pragma once
/// The functions of kernels/cpu/vector/vec.hpp and philox.hpp over arrays: compiled once per instruction set
/// by vec_functions_*.cpp for vec_test.cpp and philox_test.cpp.

#include <cstdint>

#include "kernels/cpu/vector/isa.hpp"
#include "tessera/base/dtype.hpp"
#include "tessera/base/philox.hpp"

TESSERA_EACH_ISA(int vec_lanes(); void vec_exp(const float* x, float* y, int n);
                 void vec_sqrt(const float* x, float* y, int n);
                 void vec_max_min(const float* a, const float* b, float* max_out, float* min_out, int n);
                 float vec_sum(const float* x); float vec_max_lane(const float* x);
                 void vec_narrow(const float* x, bfloat16* y, int n);
                 void vec_widen(const bfloat16* x, float* y, int n);
                 void vec_narrow_half(const float* x, float16* y, int n);
                 void vec_widen_half(const float16* x, float* y, int n);
                 void vec_first_floats(const float* x, float* lanes, int n, float fill);
                 void vec_first_bf16(const bfloat16* x, float* lanes, int n, float fill);
                 void vec_first_f16(const float16* x, float* lanes, int n, float fill);
                 void vec_store_first(const float* lanes, bfloat16* y, int n);
                 void vec_store_first_f16(const float* lanes, float16* y, int n);
                 void vec_random_words(const RngKey& key, std::uint64_t block, std::uint32_t* words);)
