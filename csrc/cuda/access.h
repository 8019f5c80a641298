// Memory accesses of kernels, and the types in which they compute. This file also compiles for the
// host, where host_kernels.cc runs the kernels' code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "reduce/half_bits.h"
#include "reduce/operations.h"
#include "support/simd.h"

#ifdef __CUDACC__
#define PYCOLLECTIVE_UNROLLED _Pragma("unroll")
#define PYCOLLECTIVE_NOT_UNROLLED _Pragma("unroll 1")
#else
#define PYCOLLECTIVE_UNROLLED
#define PYCOLLECTIVE_NOT_UNROLLED
#endif

namespace pycollective::cuda {

// Threads of a block in every kernel.
inline constexpr unsigned kThreads = 256;
// The widest memory access of a thread.
inline constexpr std::size_t kVectorBytes = 16;

// The position of a thread in its launch.
struct Thread {
  std::size_t block, blocks;
  unsigned thread;
};

// Halves are stored as their bits and computed in float32.
struct Float16 {
  std::uint16_t bits;
};
struct Bfloat16 {
  std::uint16_t bits;
};

template <class T>
inline constexpr bool is_half = std::is_same_v<T, Float16> || std::is_same_v<T, Bfloat16>;
template <class T>
using Computed = std::conditional_t<is_half<T>, float, T>;

template <class T>
PYCOLLECTIVE_INLINE Computed<T> widened(T value) {
  if constexpr (std::is_same_v<T, Float16>) {
#ifdef __CUDA_ARCH__
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
    return result;
#else
    return arithmetic::widen_f16(value.bits);
#endif
  } else if constexpr (std::is_same_v<T, Bfloat16>) {
    return arithmetic::widen_bf16(value.bits);
  } else {
    return value;
  }
}

template <class T>
PYCOLLECTIVE_INLINE T narrowed(Computed<T> value) {
  if constexpr (std::is_same_v<T, Float16>) {
#ifdef __CUDA_ARCH__
    std::uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return {bits};
#else
    return {arithmetic::narrow_f16(value)};
#endif
  } else if constexpr (std::is_same_v<T, Bfloat16>) {
    return {arithmetic::narrow_bf16(value)};
  } else {
    return value;
  }
}

#ifdef __CUDACC__
template <std::size_t kBytes>
struct WordOf;
template <>
struct WordOf<16> {
  using type = uint4;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<4> {
  using type = unsigned;
};
template <>
struct WordOf<2> {
  using type = unsigned short;
};
template <>
struct WordOf<1> {
  using type = unsigned char;
};
#endif

// Throws for an unaligned access, which would fail on a GPU.
void check_access(const void* place, std::size_t bytes);

// Adjacent numbers that are read or written in one access.
template <class T, int kLanes>
struct Lanes {
  static constexpr std::size_t kBytes = sizeof(T) * kLanes;
  T items[kLanes];

  // Each byte is read once, so the caches may evict it first.
  PYCOLLECTIVE_INLINE void read(const void* from) {
#ifdef __CUDA_ARCH__
    auto word = __ldcs(static_cast<const typename WordOf<kBytes>::type*>(from));
    memcpy(items, &word, kBytes);
#else
    check_access(from, kBytes);
    std::memcpy(items, from, kBytes);
#endif
  }

  PYCOLLECTIVE_INLINE void write(void* to) const {
#ifdef __CUDA_ARCH__
    typename WordOf<kBytes>::type word;
    memcpy(&word, items, kBytes);
    *static_cast<typename WordOf<kBytes>::type*>(to) = word;
#else
    check_access(to, kBytes);
    std::memcpy(to, items, kBytes);
#endif
  }

  // Reads byte by byte if not aligned.
  PYCOLLECTIVE_INLINE void read(const void* from, bool aligned) {
    if (aligned) return read(from);
    auto* bytes = static_cast<const unsigned char*>(from);
    unsigned char copies[kBytes];
    PYCOLLECTIVE_UNROLLED
    for (std::size_t i = 0; i < kBytes; ++i) copies[i] = bytes[i];
    memcpy(items, copies, kBytes);
  }

  PYCOLLECTIVE_INLINE void write(void* to, bool aligned) const {
    if (aligned) return write(to);
    unsigned char copies[kBytes];
    memcpy(copies, items, kBytes);
    PYCOLLECTIVE_UNROLLED
    for (std::size_t i = 0; i < kBytes; ++i) static_cast<unsigned char*>(to)[i] = copies[i];
  }
};

PYCOLLECTIVE_INLINE const void* at(const void* base, std::size_t bytes) {
  return static_cast<const char*>(base) + bytes;
}
PYCOLLECTIVE_INLINE void* at(void* base, std::size_t bytes) {
  return static_cast<char*>(base) + bytes;
}

PYCOLLECTIVE_INLINE bool is_aligned(const void* place, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(place) % bytes == 0;
}

}  // namespace pycollective::cuda
