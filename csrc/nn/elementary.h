// Elementary functions from operations that compilers vectorize: no branches, no tables. Errors are
// at most 3 units in the last place. NaN gives NaN.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "support/simd.h"

namespace pycollective::nn {

// Coefficients of polynomials, from the constant on. They interpolate at Chebyshev's points.
template <typename T>
struct Elementary;

template <>
struct Elementary<float> {
  using Bits = std::int32_t;
  // Beyond these bounds exp is 0 and infinite.
  static constexpr float kLowest = -104.0f, kHighest = 88.8f;
  static constexpr float kRound = 0x1.8p23f;
  static constexpr float kLn2High = 0x1.62ep-1f, kLn2Low = 0x1.0bfbe8p-15f;
  static constexpr int kMantissa = 23, kExpTerms = 7, kLogTerms = 7;
  static constexpr Bits kExponentBias = 127;
  // erf(x) / x - 1 for |x| <= 1, by x^2
  static constexpr float kErf[] = {
      0.1283791671f,   -0.3761263847f,    0.112837825f,     -0.02686543073f,
      0.005221031808f, -0.0008484080406f, 0.0001126595903f, -9.667044571e-6f,
  };
  // -log(erfc(x)) for 1 <= x <= kErfEnd, by x - kErfMiddle
  static constexpr float kErfMiddle = 2.5f, kErfEnd = 4.0f;
  static constexpr float kLogErfc[] = {
      7.806815273f,     5.352680741f,     0.9438937363f,    0.01085816384f,
      -0.002165501739f, 0.0004207096483f, -7.696963264e-5f, 1.297452581e-5f,
      -1.829792757e-6f, 6.614636861e-8f,  3.834714142e-8f,
  };
};

template <>
struct Elementary<double> {
  using Bits = std::int64_t;
  static constexpr double kLowest = -746.0, kHighest = 709.8;
  static constexpr double kRound = 0x1.8p52;
  static constexpr double kLn2High = 0x1.62e42feep-1, kLn2Low = 0x1.a39ef35793c76p-33;
  static constexpr int kMantissa = 52, kExpTerms = 13, kLogTerms = 16;
  static constexpr Bits kExponentBias = 1023;
  static constexpr double kErf[] = {
      0.128379167095512574,    -0.376126389031837525,     0.112837916709551256,
      -0.0268661706451312185,  0.00522397762544167401,    -0.000854832702340300061,
      0.000120553329788794839, -0.0000149256502369675017, 1.64621107820186364e-6,
      -1.63657686488320721e-7, 1.48060271461287517e-8,    -1.22777344867955238e-9,
      9.32372351815302663e-11, -6.19673642878769998e-12,  2.80671281956112625e-13,
  };
  static constexpr double kErfMiddle = 3.5, kErfEnd = 6.0;
  static constexpr double kLogErfc[] = {
      14.1124374021481738,      7.26609958836519067,      0.966753054742230149,
      0.00522565822194286061,   -0.000873687323640823716, 0.000147297774887817438,
      -0.000024386373538371928, 3.8895571774332908e-6,    -5.85614342021468573e-7,
      8.0693009210598874e-8,    -9.53166232456755978e-9,  7.7490982160991445e-10,
      2.47979619273135327e-11,  -3.06579974706522549e-11, 9.18163254922417323e-12,
      -2.05374382433180993e-12, 3.93655553611787059e-13,  -6.73265894390408242e-14,
      8.93331293903663731e-15,  -5.18112696321671019e-16, 2.37276178676315808e-17,
      -2.07184957445762539e-17, -7.95415950552728652e-18, 5.09527760266909521e-18,
      -6.32552058871849272e-19,
  };
};

template <typename T, std::size_t kCount>
PYCOLLECTIVE_INLINE T polynomial(const T (&coefficients)[kCount], T x) {
  T sum = coefficients[kCount - 1];
  // Compilers vectorize the callers' loops only if this loop is unrolled.
#pragma GCC unroll 32
  for (std::size_t i = kCount - 1; i > 0; --i) sum = sum * x + coefficients[i - 1];
  return sum;
}

// x as k ln2 + r with |r| <= ln2 / 2: k, and exp(r) - 1.
template <typename T>
struct Reduced {
  typename Elementary<T>::Bits k;
  T rest;
};

template <typename T>
PYCOLLECTIVE_INLINE Reduced<T> reduced(T x) {
  using E = Elementary<T>;
  using Bits = typename E::Bits;
  x = x < E::kLowest ? E::kLowest : x;
  x = x > E::kHighest ? E::kHighest : x;
  // Adding 1.5 * 2^mantissa rounds to an integer in the low bits.
  const T shifted = x * T(1.4426950408889634074) + E::kRound;
  const T k = shifted - E::kRound;
  const T r = (x - k * E::kLn2High) - k * E::kLn2Low;
  T sum = 1;
  for (int i = E::kExpTerms; i > 1; --i) sum = sum * (r * (T(1) / T(i))) + T(1);
  return {std::bit_cast<Bits>(shifted) - std::bit_cast<Bits>(E::kRound), r * sum};
}

// 2^k, assembled from bits, for the exponents of normal numbers.
template <typename T>
PYCOLLECTIVE_INLINE T power_of_two(typename Elementary<T>::Bits k) {
  using E = Elementary<T>;
  return std::bit_cast<T>((k + E::kExponentBias) << E::kMantissa);
}

template <typename T>
PYCOLLECTIVE_INLINE T exp_of(T x) {
  const Reduced<T> parts = reduced(x);
  // Two factors, since 2^k itself may be infinite or subnormal.
  const auto half = parts.k >> 1;
  return (parts.rest + T(1)) * power_of_two<T>(half) * power_of_two<T>(parts.k - half);
}

// exp(x) - 1 for x <= 0.
template <typename T>
PYCOLLECTIVE_INLINE T expm1_of_negative(T x) {
  constexpr T kMinusOne = -T(Elementary<T>::kMantissa);  // exp of less is lost beside 1
  const Reduced<T> parts = reduced(x < 2 * kMinusOne ? 2 * kMinusOne : x);
  const T power = power_of_two<T>(parts.k);
  return parts.rest * power + (power - T(1));
}

// log(1 + x) for 0 <= x <= 1: 2 atanh(s) with s = x / (2 + x), by its Taylor series.
template <typename T>
PYCOLLECTIVE_INLINE T log1p_of_fraction(T x) {
  const T s = x / (x + T(2)), square = s * s;
  T sum = T(1) / T(2 * Elementary<T>::kLogTerms + 1);
  for (int i = Elementary<T>::kLogTerms - 1; i >= 0; --i) sum = sum * square + T(1) / T(2 * i + 1);
  return T(2) * s * sum;
}

// log(x) for every x: m 2^k with m near 1, and 2 atanh(s) with s = (m - 1) / (m + 1).
template <typename T>
PYCOLLECTIVE_INLINE T log_of(T x) {
  using E = Elementary<T>;
  using Bits = typename E::Bits;
  constexpr T kScale = T(Bits{1} << E::kMantissa);
  constexpr T kLeast = std::numeric_limits<T>::min(),
              kInfinity = std::numeric_limits<T>::infinity();
  const bool subnormal = x < kLeast;
  const Bits bits = std::bit_cast<Bits>(subnormal ? x * kScale : x);
  // Exponents change at sqrt(1/2), so that k is 0 around 1.
  constexpr Bits kHalf = std::bit_cast<Bits>(T(0.70710678118654752440));
  const Bits k = (bits - kHalf) >> E::kMantissa;
  const T m = std::bit_cast<T>(bits - (k << E::kMantissa));
  const T f = m - T(1), s = f / (f + T(2)), square = s * s;
  T sum = T(1) / T(2 * E::kLogTerms + 1);
  for (int i = E::kLogTerms - 1; i >= 1; --i) sum = sum * square + T(1) / T(2 * i + 1);
  // f - s f + 2 s^3 sum: the largest summand is exact.
  const T exponent = T(k) - (subnormal ? T(E::kMantissa) : T(0));
  const T low = T(2) * s * square * sum - s * f + exponent * E::kLn2Low;
  const T y = exponent * E::kLn2High + (f + low);
  const T special = x == 0 ? -kInfinity : x < 0 ? std::numeric_limits<T>::quiet_NaN() : x;
  return x > 0 && x < kInfinity ? y : special;
}

// log(1 + x), corrected by what 1 + x rounds off.
template <typename T>
PYCOLLECTIVE_INLINE T log1p_of(T x) {
  const T u = T(1) + x, rest = u - T(1);
  const T y = log_of(u) * (x / rest);
  return rest == 0 || u > std::numeric_limits<T>::max() ? x : u == 0 ? log_of(u) : y;
}

template <typename T>
PYCOLLECTIVE_INLINE T with_sign_of(T magnitude, T x) {
  return x < 0 ? -magnitude : magnitude;
}

template <typename T>
PYCOLLECTIVE_INLINE T magnitude_of(T x) {
  return x < 0 ? -x : x;
}

template <typename T>
PYCOLLECTIVE_INLINE T tanh_of(T x) {
  const T e = expm1_of_negative(T(-2) * magnitude_of(x));
  return with_sign_of(-e / (e + T(2)), x);
}

template <typename T>
PYCOLLECTIVE_INLINE T sigmoid_of(T x) {
  return T(1) / (T(1) + exp_of(-x));
}

template <typename T>
PYCOLLECTIVE_INLINE T erf_of(T x) {
  using E = Elementary<T>;
  const T a = magnitude_of(x);
  const T inner = x + x * polynomial(E::kErf, x * x);
  const T clipped = a > E::kErfEnd ? E::kErfEnd : a;
  const T outer = T(1) - exp_of(-polynomial(E::kLogErfc, clipped - E::kErfMiddle));
  return a <= T(1) ? inner : with_sign_of(outer, x);
}

}  // namespace pycollective::nn
