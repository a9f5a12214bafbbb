#if defined(__x86_64__)
#include "tests/kernels/vec_functions.hpp"  // what it includes must not be compiled for the wider target

#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")
#define TESSERA_ISA avx512
#define TESSERA_VECTOR_BYTES 64
#include "tests/kernels/vec_functions_impl.hpp"
#endif
