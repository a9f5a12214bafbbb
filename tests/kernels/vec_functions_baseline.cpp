#define TESSERA_ISA baseline
#define TESSERA_VECTOR_BYTES 16
#include "tests/kernels/vec_functions_impl.hpp"
