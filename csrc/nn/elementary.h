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
  // erfc(x) exp(x^2) / t for x >= 0, by 1 - t with t = 1 / (1 + kErfcScale x)
  static constexpr float kErfcScale = 0.45f;
  static constexpr float kErfc[] = {
      1.0f,           -1.507509085f,    0.923224745f,    0.03786976443f,
      -0.2356334856f, -0.006780264738f, -0.05725161824f, 0.2223399553f,
      -0.1584986364f, 0.03612391126f,
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
  static constexpr double kErfcScale = 0.3;
  static constexpr double kErfc[] = {
      1.00000000000000000,    -2.7612638903183746,    4.58858333047384015,    -4.81167233990378751,
      2.90515015324616055,    -0.492990706903712606,  -0.541294687732352897,  0.238131310190073886,
      0.134384266696985361,   -0.0656460967383607069, -0.0584037009265923265, 0.046172153514317249,
      -0.0772149509571075504, 0.219213138135312097,   -0.386037609613227695,  0.509333058476334144,
      -0.525787169395817711,  0.402649684346349346,   -0.21554043636710668,   0.0757216203325180581,
      -0.0156850075080523302, 0.0014547560169288242,
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

// 1 / 1!, 1 / 2!, ...: the terms of (exp(r) - 1) / r.
template <typename T>
struct Expm1 {
  T terms[Elementary<T>::kExpTerms];
  constexpr Expm1() : terms{} {
    double factorial = 1;
    for (int i = 0; i < Elementary<T>::kExpTerms; ++i) terms[i] = T(1 / (factorial *= i + 1));
  }
};
template <typename T>
constexpr Expm1<T> kExpm1{};

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
  return {std::bit_cast<Bits>(shifted) - std::bit_cast<Bits>(E::kRound),
          r * polynomial(kExpm1<T>.terms, r)};
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
  constexpr T kMinusOne = -T(Elementary<T>::kMantissa);  // below it, the result rounds to -1
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

// log(1 + x), corrected for the rounding error of 1 + x.
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

// Terms of the Taylor series of sin(r) / r, and of cos(r), by r^2, for results in T.
template <typename T>
struct Circular {
  static constexpr int kTerms = sizeof(T) == 4 ? 6 : 9;
  double sine[kTerms], cosine[kTerms];
  constexpr Circular() : sine{}, cosine{} {
    double factorial = 1;
    for (int i = 0; i < kTerms; ++i) {
      cosine[i] = (i % 2 ? -1 : 1) / factorial;
      sine[i] = cosine[i] / (2 * i + 1);
      factorial *= (2 * i + 1) * (2 * i + 2);
    }
  }
};
template <typename T>
constexpr Circular<T> kCircular{};

// The bound of |x| in sine_of.
template <typename T>
constexpr T kFar = sizeof(T) == 4 ? T(0x1p20) : T(0x1p10);
// sin(x + quarters pi / 2), where |x| is below kFar<T>.
template <typename T>
PYCOLLECTIVE_INLINE T sine_of(T x, std::int64_t quarters) {
  constexpr double kRound = Elementary<double>::kRound;
  const double shifted = static_cast<double>(x) * 0.63661977236758134308 + kRound;
  const double k = shifted - kRound;
  // pi / 2 in parts whose products with k are exact.
  const double r = ((static_cast<double>(x) - k * 0x1.921fb544p0) - k * 0x1.0b4611a6p-34) -
                   k * 0x1.3198a2e037073p-69;
  const std::int64_t turns =
      std::bit_cast<std::int64_t>(shifted) - std::bit_cast<std::int64_t>(kRound) + quarters;
  const double square = r * r;
  const double even = polynomial(kCircular<T>.cosine, square);
  const double odd = r + r * (polynomial(kCircular<T>.sine, square) - 1);
  const double y = turns & 1 ? even : odd;
  return static_cast<T>(turns & 2 ? -y : y);
}

template <typename T>
PYCOLLECTIVE_INLINE T tanh_of(T x) {
  const T e = expm1_of_negative(T(-2) * magnitude_of(x));
  return x == 0 ? x : with_sign_of(-e / (e + T(2)), x);  // keeps the sign of 0
}

template <typename T>
PYCOLLECTIVE_INLINE T sigmoid_of(T x) {
  return T(1) / (T(1) + exp_of(-x));
}

// erfc(x) exp(x^2) for x >= 0.
template <typename T>
PYCOLLECTIVE_INLINE T scaled_erfc_of(T x) {
  const T scaled = Elementary<T>::kErfcScale * x;
  const T u = scaled > T(100) ? T(100) : scaled;  // beyond, exp(-x^2) is 0
  const T t = T(1) / (T(1) + u);
  return t * polynomial(Elementary<T>::kErfc, u * t);
}

template <typename T>
PYCOLLECTIVE_INLINE T erf_of(T x) {
  const T a = magnitude_of(x);
  const T inner = x + x * polynomial(Elementary<T>::kErf, x * x);
  const T outer = T(1) - exp_of(-x * x) * scaled_erfc_of(a);
  return a <= T(1) ? inner : with_sign_of(outer, x);
}

}  // namespace pycollective::nn
