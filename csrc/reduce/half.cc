#include "reduce/half.h"

#include "reduce/half_bits.h"
#include "support/simd.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define PYCOLLECTIVE_F16C 1
#include <immintrin.h>
#endif

namespace pycollective {
namespace {

using namespace arithmetic;

#define PYCOLLECTIVE_CONVERSIONS(TYPE)                                             \
  PYCOLLECTIVE_CLONES void widen_all_##TYPE(float* to, const std::uint16_t* from,  \
                                            std::size_t count) {                   \
    PYCOLLECTIVE_INDEPENDENT                                                       \
    for (std::size_t i = 0; i < count; ++i) to[i] = widen_##TYPE(from[i]);         \
  }                                                                                \
  PYCOLLECTIVE_CLONES void narrow_all_##TYPE(std::uint16_t* to, const float* from, \
                                             std::size_t count) {                  \
    PYCOLLECTIVE_INDEPENDENT                                                       \
    for (std::size_t i = 0; i < count; ++i) to[i] = narrow_##TYPE(from[i]);        \
  }

PYCOLLECTIVE_CONVERSIONS(f16)
PYCOLLECTIVE_CONVERSIONS(bf16)

constexpr HalfType kPortableFloat16 = {widen_all_f16, narrow_all_f16};
constexpr HalfType kBfloat16 = {widen_all_bf16, narrow_all_bf16};

#ifdef PYCOLLECTIVE_F16C

// GCC 12 does not vectorize conversions of _Float16, so intrinsics are used.
// The loops of half_bits.h take several times as long.
__attribute__((target("avx,f16c"))) void widen_by_f16c(float* to, const std::uint16_t* from,
                                                       std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(eight));
  }
  for (; i < count; ++i) to[i] = widen_f16(from[i]);
}

__attribute__((target("avx,f16c"))) void narrow_by_f16c(std::uint16_t* to, const float* from,
                                                        std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), eight);
  }
  for (; i < count; ++i) to[i] = narrow_f16(from[i]);
}

constexpr HalfType kF16c = {widen_by_f16c, narrow_by_f16c};

#endif

}  // namespace

const HalfType& portable_float16() { return kPortableFloat16; }
const HalfType& bfloat16() { return kBfloat16; }

const HalfType& float16() {
#ifdef PYCOLLECTIVE_F16C
  // Every processor with AVX2 has F16C.
  static const bool has = __builtin_cpu_supports("avx2");
  if (has) return kF16c;
#endif
  return kPortableFloat16;
}

}  // namespace pycollective
