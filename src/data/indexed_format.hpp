#pragma once
/// Constants of the .idx layout shared by reader and writer.

#include <array>
#include <cstdint>

#include "tessera/base/dtype.hpp"

namespace tessera::indexed {

inline constexpr char kMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', '\0', '\0'};
inline constexpr std::uint64_t kVersion = 1;
inline constexpr std::int64_t kHeaderBytes = 34;
/// Of the older layout.
inline constexpr char kOldMagic[8] = {'T', 'N', 'T', 'I', 'D', 'X', '\0', '\0'};
inline constexpr std::int64_t kOldHeaderBytes = 48;
/// Token type of code i + 1.
inline constexpr std::array<DType, 8> kTokenTypes = {DType::u8,  DType::i8,  DType::i16, DType::i32,
                                                     DType::i64, DType::f64, DType::f32, DType::u16};

}  // namespace tessera::indexed
