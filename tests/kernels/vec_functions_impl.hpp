/// Included once by each vec_functions_*.cpp, which has set TESSERA_ISA, TESSERA_VECTOR_BYTES and the target.

#include "kernels/cpu/vector/philox.hpp"
#include "tests/kernels/vec_functions.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {

int vec_lanes() { return kLanes; }

void vec_exp(const float* x, float* y, int n) {
  for_lanes(0, n,
            [&](std::int64_t i, auto lanes) VEC_LAMBDA { store(y + i, exp(load(x + i, lanes)), lanes); });
}
void vec_sqrt(const float* x, float* y, int n) {
  for_lanes(0, n,
            [&](std::int64_t i, auto lanes) VEC_LAMBDA { store(y + i, sqrt(load(x + i, lanes)), lanes); });
}
void vec_max_min(const float* a, const float* b, float* max_out, float* min_out, int n) {
  for_lanes(0, n, [&](std::int64_t i, auto lanes) VEC_LAMBDA {
    store(max_out + i, max(load(a + i, lanes), load(b + i, lanes)), lanes);
    store(min_out + i, min(load(a + i, lanes), load(b + i, lanes)), lanes);
  });
}
float vec_sum(const float* x) { return sum(load(x)); }
float vec_max_lane(const float* x) { return max_lane(load(x)); }
void vec_narrow(const float* x, bfloat16* y, int n) {
  for_lanes(0, n, [&](std::int64_t i, auto lanes) VEC_LAMBDA { store(y + i, load(x + i, lanes), lanes); });
}
void vec_widen(const bfloat16* x, float* y, int n) {
  for_lanes(0, n, [&](std::int64_t i, auto lanes) VEC_LAMBDA { store(y + i, load(x + i, lanes), lanes); });
}
void vec_narrow_half(const float* x, float16* y, int n) {
  for_lanes(0, n, [&](std::int64_t i, auto lanes) VEC_LAMBDA { store(y + i, load(x + i, lanes), lanes); });
}
void vec_widen_half(const float16* x, float* y, int n) {
  for_lanes(0, n, [&](std::int64_t i, auto lanes) VEC_LAMBDA { store(y + i, load(x + i, lanes), lanes); });
}
void vec_first_floats(const float* x, float* lanes, int n, float fill) { store(lanes, load_n(x, n, fill)); }
void vec_first_bf16(const bfloat16* x, float* lanes, int n, float fill) { store(lanes, load_n(x, n, fill)); }
void vec_first_f16(const float16* x, float* lanes, int n, float fill) { store(lanes, load_n(x, n, fill)); }
void vec_store_first(const float* lanes, bfloat16* y, int n) { store_n(y, load(lanes), n); }
void vec_store_first_f16(const float* lanes, float16* y, int n) { store_n(y, load(lanes), n); }
void vec_random_words(const RngKey& key, std::uint64_t block, std::uint32_t* words) {
  U registers[4];
  random_words(key, block, registers);
  for (int j = 0; j < 4; ++j) {
    for (int i = 0; i < kLanes; ++i) words[j * kLanes + i] = registers[j][i];
  }
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
