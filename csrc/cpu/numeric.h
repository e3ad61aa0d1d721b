// Element types of rows, and their way to fp32 and back (round to nearest even).
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace tilemoe::cpu {

enum class DType : std::int32_t { f32 = 0, bf16 = 1, f16 = 2 };

inline std::int64_t element_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

inline float to_float(float v) { return v; }
inline float to_float(BFloat16 v) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(v.bits) << 16);
}
inline float to_float(Float16 v) {
  const std::uint32_t sign = static_cast<std::uint32_t>(v.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (v.bits >> 10) & 0x1fu;
  const std::uint32_t fraction = v.bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: fraction * 2^-24, exact in fp32
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | sign);
  }
  const std::uint32_t wide = exponent == 31 ? 255u : exponent + 112u;
  return std::bit_cast<float>(sign | wide << 23 | fraction << 13);
}

inline void from_float(float v, float* out) { *out = v; }
inline void from_float(float v, BFloat16* out) {
  const auto bits = std::bit_cast<std::uint32_t>(v);
  if (v != v) {
    out->bits = static_cast<std::uint16_t>(bits >> 16 | 0x40u);  // keep it a NaN
  } else {
    out->bits = static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
}
inline void from_float(float v, Float16* out) {
  const auto bits = std::bit_cast<std::uint32_t>(v);
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t half;
  if (magnitude >= 0x7f800000u) {  // infinity or NaN
    half = 0x7c00u | (magnitude > 0x7f800000u ? 0x200u : 0u);
  } else if (magnitude >= 0x477ff000u) {  // rounds to 65536 or more
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: the adder rounds at 2^-24 for us
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    half = std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  out->bits = static_cast<std::uint16_t>(sign | half);
}

}  // namespace tilemoe::cpu
