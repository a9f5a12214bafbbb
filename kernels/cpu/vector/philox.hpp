#pragma once
/// The random words of tessera/base/philox.hpp, a register of blocks at a time: the same bits as
/// random_block. Included only by files that are compiled once per instruction set.

#include "kernels/cpu/vector/vec.hpp"
#include "tessera/base/philox.hpp"

namespace tessera::kernels::cpu::TESSERA_ISA {

typedef std::uint64_t W __attribute__((vector_size(TESSERA_VECTOR_BYTES), aligned(4)));

/// The 64-bit products of the low 32 bits of every 64-bit lane with `factor`.
VEC_INLINE W wide_product(W words, std::uint32_t factor) {
#if defined(VEC_AVX512)
  return (W)_mm512_mul_epu32((__m512i)words, _mm512_set1_epi32(static_cast<int>(factor)));
#elif defined(VEC_AVX2)
  return (W)_mm256_mul_epu32((__m256i)words, _mm256_set1_epi32(static_cast<int>(factor)));
#elif defined(VEC_X86)
  return (W)_mm_mul_epu32((__m128i)words, _mm_set1_epi32(static_cast<int>(factor)));
#else
  return (words & 0xffffffffu) * std::uint64_t{factor};
#endif
}

/// One word of half of the blocks: in the low halves of 64-bit lanes, so that nothing is moved between
/// multiplications. What stands in the high halves does not matter.
struct HalfState {
  W c0, c1, c2, c3;

  TESSERA_INLINE void round(U k0, U k1) {
    const W p0 = wide_product(c0, 0xD2511F53u);
    const W p1 = wide_product(c2, 0xCD9E8D57u);
    c0 = (p1 >> 32) ^ c1 ^ (W)k0;
    c1 = p1;
    c2 = (p0 >> 32) ^ c3 ^ (W)k1;
    c3 = p0;
  }
};

/// Words 4 block .. 4 block + 4 kLanes - 1 of the stream, in order: what dropout needs for 4 kLanes features.
VEC_INLINE void random_words(const RngKey& key, std::uint64_t block, U words[4]) {
  // Lane 4 l + j works on block + (kLanes / 4) j + l: then the 4x4 transposition within each quarter
  // register, which is cheap everywhere, puts the words in order.
  const U lane = (U)iota();
  const U number = (lane & 3u) * (kLanes / 4u) + (lane >> 2);
  const auto low_word = static_cast<std::uint32_t>(block);
  const U low = number + low_word;
  const I carry = low < low_word;
  const U high = static_cast<std::uint32_t>(block >> 32) - (U)carry;
  const W site = (W)(U{} + key.site), step = (W)(U{} + key.step);
  HalfState even{(W)low, (W)high, site, step}, odd{(W)low >> 32, (W)high >> 32, site, step};
  auto k0 = static_cast<std::uint32_t>(key.seed);
  auto k1 = static_cast<std::uint32_t>(key.seed >> 32);
#pragma GCC unroll 10
  for (int i = 0; i < 10; ++i) {
    even.round(U{} + k0, U{} + k1);
    odd.round(U{} + k0, U{} + k1);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const I is_odd = (iota() & 1) != 0;
  const U c0 = is_odd ? (U)(odd.c0 << 32) : (U)even.c0;
  const U c1 = is_odd ? (U)(odd.c1 << 32) : (U)even.c1;
  const U c2 = is_odd ? (U)(odd.c2 << 32) : (U)even.c2;
  const U c3 = is_odd ? (U)(odd.c3 << 32) : (U)even.c3;
#if defined(VEC_X86)
#if defined(VEC_AVX512)
  using Register = __m512i;
#define TESSERA_UNPACK(part, a, b) _mm512_unpack##part(a, b)
#elif defined(VEC_AVX2)
  using Register = __m256i;
#define TESSERA_UNPACK(part, a, b) _mm256_unpack##part(a, b)
#else
  using Register = __m128i;
#define TESSERA_UNPACK(part, a, b) _mm_unpack##part(a, b)
#endif
  const Register ab_low = TESSERA_UNPACK(lo_epi32, (Register)c0, (Register)c1);
  const Register ab_high = TESSERA_UNPACK(hi_epi32, (Register)c0, (Register)c1);
  const Register cd_low = TESSERA_UNPACK(lo_epi32, (Register)c2, (Register)c3);
  const Register cd_high = TESSERA_UNPACK(hi_epi32, (Register)c2, (Register)c3);
  words[0] = (U)TESSERA_UNPACK(lo_epi64, ab_low, cd_low);
  words[1] = (U)TESSERA_UNPACK(hi_epi64, ab_low, cd_low);
  words[2] = (U)TESSERA_UNPACK(lo_epi64, ab_high, cd_high);
  words[3] = (U)TESSERA_UNPACK(hi_epi64, ab_high, cd_high);
#undef TESSERA_UNPACK
#else
  for (int j = 0; j < 4; ++j) {
    for (int i = 0; i < kLanes; ++i) {
      const int source = i / 4 * 4 + j;
      words[j][i] = i % 4 == 0 ? c0[source] : i % 4 == 1 ? c1[source] : i % 4 == 2 ? c2[source] : c3[source];
    }
  }
#endif
}

/// Dropout along one row of a matrix.
struct RowDropout {
  RngKey key;
  std::uint32_t threshold;
  float scale;
  std::uint64_t block;  // of feature 0

  TESSERA_INLINE RowDropout(const DropoutSpec& spec, std::int64_t row, std::int64_t features)
      : key(spec.key),
        threshold(spec.threshold()),
        scale(spec.scale()),
        block(spec.first_block(row, features)) {}

  /// Which of the features f .. f + 4 kLanes - 1 (f a multiple of 4) are kept, a register each.
  TESSERA_INLINE void kept(std::int64_t f, I keep[4]) const {
    U words[4];
    random_words(key, block + static_cast<std::uint64_t>(f / 4), words);
    for (int j = 0; j < 4; ++j) keep[j] = words[j] >= threshold;
  }
  TESSERA_INLINE F apply(F v, I keep) const { return select(keep, v * scale, F{}); }
};

/// As for_lanes_in_fours over the row's n features, with a fourth argument to body: the lanes that are kept.
template <typename Body>
VEC_INLINE void for_lanes_kept(const RowDropout& dropout, std::int64_t n, Body body) {
  I keep[4];
  std::int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    dropout.kept(i, keep);
    for (int j = 0; j < 4; ++j) body(i + j * kLanes, Whole{}, j, keep[j]);
  }
  if (i == n) return;
  dropout.kept(i, keep);
  for (int j = 0; i < n; ++j, i += kLanes) {
    if (i + kLanes <= n) {
      body(i, Whole{}, j, keep[j]);
    } else {
      body(i, Part{static_cast<int>(n - i)}, j, keep[j]);
    }
  }
}

}  // namespace tessera::kernels::cpu::TESSERA_ISA
