#pragma once
/// CUDA's keywords and built-in vector types.

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __shared__ static thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

// NOLINTBEGIN: CUDA's names
#define TESSERA_EMULATED_VECTORS(T, name, align2, align4)               \
  struct name##1 {                                                      \
    T x;                                                                \
  };                                                                    \
  struct alignas(align2) name##2 {                                      \
    T x, y;                                                             \
  };                                                                    \
  struct name##3 {                                                      \
    T x, y, z;                                                          \
  };                                                                    \
  struct alignas(align4) name##4 {                                      \
    T x, y, z, w;                                                       \
  };                                                                    \
  constexpr name##2 make_##name##2(T x, T y) { return {x, y}; }         \
  constexpr name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
  constexpr name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

TESSERA_EMULATED_VECTORS(signed char, char, 2, 4)
TESSERA_EMULATED_VECTORS(unsigned char, uchar, 2, 4)
TESSERA_EMULATED_VECTORS(short, short, 4, 8)
TESSERA_EMULATED_VECTORS(unsigned short, ushort, 4, 8)
TESSERA_EMULATED_VECTORS(int, int, 8, 16)
TESSERA_EMULATED_VECTORS(unsigned int, uint, 8, 16)
TESSERA_EMULATED_VECTORS(long long, longlong, 16, 16)
TESSERA_EMULATED_VECTORS(unsigned long long, ulonglong, 16, 16)
TESSERA_EMULATED_VECTORS(float, float, 8, 16)
TESSERA_EMULATED_VECTORS(double, double, 16, 16)
#undef TESSERA_EMULATED_VECTORS

struct dim3 {
  unsigned int x, y, z;
  constexpr dim3(unsigned int x_ = 1, unsigned int y_ = 1, unsigned int z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};
// NOLINTEND

/// Of the thread that runs; set by the scheduler at every switch.
inline thread_local constinit uint3 threadIdx{}, blockIdx{};
inline thread_local constinit dim3 blockDim{}, gridDim{};
constexpr int warpSize = 32;
