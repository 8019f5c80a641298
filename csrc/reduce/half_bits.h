// Conversions of one float16 or bfloat16 from and to float32, with integer operations that every
// processor has. See half.h.
#pragma once

#include <bit>
#include <cstdint>

#include "support/simd.h"

namespace pycollective::arithmetic {

// Signed, because SSE2 has no unsigned comparison. The sign bit is removed first.
using Bits = std::int32_t;

PYCOLLECTIVE_INLINE float widen_f16(std::uint16_t half) {
  Bits sign = static_cast<Bits>(static_cast<std::uint32_t>(half & 0x8000) << 16);
  Bits magnitude = (half & 0x7fff) << 13;
  // The exponent's bias is 15 in float16 and 127 in float32. The highest exponent (infinity, NaN)
  // stays the highest.
  Bits normal = magnitude + (112 << 23);
  Bits special = magnitude + (224 << 23);
  special |= magnitude > 0x0f800000 ? 0x00400000 : 0;  // NaNs become quiet
  // A subnormal is its mantissa in units of 2^-24: add it to 2^-14, then subtract 2^-14.
  constexpr Bits kLeast = 113 << 23;
  Bits subnormal =
      std::bit_cast<Bits>(std::bit_cast<float>(magnitude + kLeast) - std::bit_cast<float>(kLeast));
  Bits result = magnitude < 0x00800000 ? subnormal : normal;
  result = magnitude >= 0x0f800000 ? special : result;
  return std::bit_cast<float>(result | sign);
}

PYCOLLECTIVE_INLINE std::uint16_t narrow_f16(float value) {
  Bits bits = std::bit_cast<Bits>(value);
  Bits sign = (bits >> 16) & 0x8000;
  Bits magnitude = bits & 0x7fffffff;
  // Add half a unit of the last place, less one if the result is even already: ties go to even.
  Bits normal = (magnitude - (112 << 23) + 0x0fff + ((magnitude >> 13) & 1)) >> 13;
  // Adding 0.5, whose last place is 2^-24, makes the processor round to a multiple of 2^-24.
  Bits subnormal = std::bit_cast<Bits>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
  Bits special = magnitude > 0x7f800000 ? 0x7e00 | ((magnitude >> 13) & 0x3ff) : 0x7c00;
  Bits result = magnitude < (113 << 23) ? subnormal : normal;
  result = magnitude >= (143 << 23) ? special : result;  // overflow: from 2^16 on
  return static_cast<std::uint16_t>(result | sign);
}

PYCOLLECTIVE_INLINE float widen_bf16(std::uint16_t half) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16);
}

PYCOLLECTIVE_INLINE std::uint16_t narrow_bf16(float value) {
  auto bits = std::bit_cast<std::uint32_t>(value);
  std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  bool nan = static_cast<Bits>(bits & 0x7fffffff) > 0x7f800000;
  return static_cast<std::uint16_t>(nan ? (bits >> 16) | 0x40 : rounded);
}

}  // namespace pycollective::arithmetic
