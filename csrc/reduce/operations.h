// The arithmetic of the table's operations on two elements, for processors (reduce.cc) and for GPUs
// (cuda/combine.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "support/simd.h"

namespace pycollective::arithmetic {

// Element types: bytes that are true or false, numbers, complex numbers.
struct Truth {
  std::uint8_t byte;
};
template <class T>
struct Complex {
  T real, imag;
};

template <class T>
inline constexpr bool is_complex = false;
template <class T>
inline constexpr bool is_complex<Complex<T>> = true;

// Signed ints wrap around if computed as unsigned ints. These must be at least as wide as int:
// narrower ones would be promoted to int, whose overflow is undefined.
template <class T, bool = std::is_integral_v<T>>
struct WrappingOf {
  using type = T;
};
template <class T>
struct WrappingOf<T, true> {
  using type = std::conditional_t<sizeof(T) <= 4, std::uint32_t, std::uint64_t>;
};
template <class T>
using Wrapping = typename WrappingOf<T>::type;

template <class T>
inline constexpr bool is_number = std::is_arithmetic_v<T>;

template <class T, bool = std::is_integral_v<T>>
struct UnsignedOf {
  using type = T;
};
template <class T>
struct UnsignedOf<T, true> {
  using type = std::make_unsigned_t<T>;
};
template <class T>
using Unsigned = typename UnsignedOf<T>::type;

// Operations. takes<T>: true for the types that have the operation. Same<T>: a type that gives the
// same bits, so that one loop serves both.
struct Sum {
  template <class T>
  static constexpr bool takes = is_number<T> || is_complex<T>;
  template <class T>
  using Same = Unsigned<T>;
  template <class T>
  PYCOLLECTIVE_INLINE static T of(T a, T b) {
    if constexpr (is_complex<T>) {
      return {a.real + b.real, a.imag + b.imag};
    } else {
      return static_cast<T>(Wrapping<T>(a) + Wrapping<T>(b));
    }
  }
};

struct Prod {
  template <class T>
  static constexpr bool takes = is_number<T> || is_complex<T>;
  template <class T>
  using Same = Unsigned<T>;
  template <class T>
  PYCOLLECTIVE_INLINE static T of(T a, T b) {
    if constexpr (is_complex<T>) {
      return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
    } else {
      return static_cast<T>(Wrapping<T>(a) * Wrapping<T>(b));
    }
  }
};

struct And {
  template <class T>
  static constexpr bool takes = std::is_integral_v<T> || std::is_same_v<T, Truth>;
  template <class T>
  using Same = Unsigned<T>;
  template <class T>
  PYCOLLECTIVE_INLINE static T of(T a, T b) {
    if constexpr (std::is_same_v<T, Truth>) {
      return {static_cast<std::uint8_t>((a.byte != 0) & (b.byte != 0))};
    } else {
      return static_cast<T>(a & b);
    }
  }
};

struct Or {
  template <class T>
  static constexpr bool takes = And::takes<T>;
  template <class T>
  using Same = Unsigned<T>;
  template <class T>
  PYCOLLECTIVE_INLINE static T of(T a, T b) {
    if constexpr (std::is_same_v<T, Truth>) {
      return {static_cast<std::uint8_t>((a.byte | b.byte) != 0)};
    } else {
      return static_cast<T>(a | b);
    }
  }
};

struct Xor {
  template <class T>
  static constexpr bool takes = And::takes<T>;
  template <class T>
  using Same = Unsigned<T>;
  template <class T>
  PYCOLLECTIVE_INLINE static T of(T a, T b) {
    if constexpr (std::is_same_v<T, Truth>) {
      return {static_cast<std::uint8_t>((a.byte != 0) ^ (b.byte != 0))};
    } else {
      return static_cast<T>(a ^ b);
    }
  }
};

struct Min {
  template <class T>
  static constexpr bool takes = is_number<T> || std::is_same_v<T, Truth>;
  template <class T>
  using Same = T;
  template <class T>
  PYCOLLECTIVE_INLINE static T of(T a, T b) {
    if constexpr (std::is_same_v<T, Truth>) {
      return And::of(a, b);
    } else {
      return (a < b || a != a) ? a : b;
    }
  }
};

struct Max {
  template <class T>
  static constexpr bool takes = is_number<T> || std::is_same_v<T, Truth>;
  template <class T>
  using Same = T;
  template <class T>
  PYCOLLECTIVE_INLINE static T of(T a, T b) {
    if constexpr (std::is_same_v<T, Truth>) {
      return Or::of(a, b);
    } else {
      return (a > b || a != a) ? a : b;
    }
  }
};

// A mean is a sum that is divided when all contributions have been added.
struct Mean : Sum {};

// Ints of at most this size are divided in a floating-point type that represents them exactly,
// because that vectorizes. On GPUs the limit is smaller: many are slow in float64.
#ifdef __CUDA_ARCH__
inline constexpr std::size_t kDividedAsFloats = 2;
#else
inline constexpr std::size_t kDividedAsFloats = 4;
#endif

// Returns a number divided by a number of ranks; ints are rounded toward zero.
template <class T>
PYCOLLECTIVE_INLINE T quotient(T a, int size) {
  if constexpr (is_complex<T>) {
    return {quotient(a.real, size), quotient(a.imag, size)};
  } else if constexpr (std::is_integral_v<T> && sizeof(T) <= kDividedAsFloats) {
    using Wide = std::conditional_t<sizeof(T) <= 2, float, double>;
    return static_cast<T>(static_cast<Wide>(a) / static_cast<Wide>(size));
  } else {
    return a / static_cast<T>(size);
  }
}

}  // namespace pycollective::arithmetic
