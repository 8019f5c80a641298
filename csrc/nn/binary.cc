#include <algorithm>
#include <cmath>
#include <type_traits>

#include "nn/kernels.h"
#include "support/simd.h"

// An operation of two operands is a struct with value(x, y), and by_x(g, x, y) and by_y(g, x, y),
// the gradients. To add one, write it here, and name it once at the end.
namespace pycollective::nn {
namespace binaries {

template <typename T>
struct Add {
  static PYCOLLECTIVE_INLINE T value(T x, T y) { return x + y; }
  static PYCOLLECTIVE_INLINE T by_x(T g, T, T) { return g; }
  static PYCOLLECTIVE_INLINE T by_y(T g, T, T) { return g; }
};

template <typename T>
struct AddRelu {
  static PYCOLLECTIVE_INLINE T value(T x, T y) { return x + y < 0 ? T(0) : x + y; }
  static PYCOLLECTIVE_INLINE T by_x(T g, T x, T y) { return x + y > 0 ? g : T(0); }
  static PYCOLLECTIVE_INLINE T by_y(T g, T x, T y) { return by_x(g, x, y); }
};

template <typename T>
struct Subtract {
  static PYCOLLECTIVE_INLINE T value(T x, T y) { return x - y; }
  static PYCOLLECTIVE_INLINE T by_x(T g, T, T) { return g; }
  static PYCOLLECTIVE_INLINE T by_y(T g, T, T) { return -g; }
};

template <typename T>
struct Multiply {
  static PYCOLLECTIVE_INLINE T value(T x, T y) { return x * y; }
  static PYCOLLECTIVE_INLINE T by_x(T g, T, T y) { return g * y; }
  static PYCOLLECTIVE_INLINE T by_y(T g, T x, T) { return g * x; }
};

template <typename T>
struct Divide {
  static PYCOLLECTIVE_INLINE T value(T x, T y) { return x / y; }
  static PYCOLLECTIVE_INLINE T by_x(T g, T, T y) { return g / y; }
  static PYCOLLECTIVE_INLINE T by_y(T g, T x, T y) { return -(g * (x / y) / y); }
};

// The result is NaN if an operand is NaN. Equal operands: x gets the gradient. If an operand is
// NaN, y gets the gradient.
template <typename T>
struct Maximum {
  static PYCOLLECTIVE_INLINE T value(T x, T y) { return x >= y || x != x ? x : y; }
  static PYCOLLECTIVE_INLINE T by_x(T g, T x, T y) { return x >= y ? g : T(0); }
  static PYCOLLECTIVE_INLINE T by_y(T g, T x, T y) { return x >= y ? T(0) : g; }
};

template <typename T>
struct Minimum {
  static PYCOLLECTIVE_INLINE T value(T x, T y) { return x <= y || x != x ? x : y; }
  static PYCOLLECTIVE_INLINE T by_x(T g, T x, T y) { return x <= y ? g : T(0); }
  static PYCOLLECTIVE_INLINE T by_y(T g, T x, T y) { return x <= y ? T(0) : g; }
};

template <typename T>
struct SquaredDifference {
  static PYCOLLECTIVE_INLINE T value(T x, T y) { return (x - y) * (x - y); }
  static PYCOLLECTIVE_INLINE T by_x(T g, T x, T y) { return g * (x - y) * T(2); }
  static PYCOLLECTIVE_INLINE T by_y(T g, T x, T y) { return g * (y - x) * T(2); }
};

// The remainder has the sign of y.
template <typename T>
struct Mod {
  static PYCOLLECTIVE_INLINE T with_sign_of(T y, T rest) {
    return rest == 0 ? std::copysign(T(0), y) : (rest < 0) != (y < 0) ? rest + y : rest;
  }
  static PYCOLLECTIVE_INLINE T value(T x, T y) { return with_sign_of(y, std::fmod(x, y)); }
  // Returns value(x, y) by a division, which compilers vectorize. Sets `far` if the result may be
  // wrong. Below 2^29 the rounded quotient of two floats has the right integer part, and the
  // product of that part and y is exact.
  static PYCOLLECTIVE_INLINE float quick(float x, float y, int& far) {
    const double a = x, b = y, q = std::trunc(a / b);
    far |= !(std::abs(q) < 0x1p29) | !(std::abs(b) <= 0x1p128);
    return with_sign_of(y, static_cast<float>(a - q * b));
  }
  static PYCOLLECTIVE_INLINE T by_x(T g, T, T) { return g; }
  static PYCOLLECTIVE_INLINE T by_y(T g, T x, T y) { return -(g * std::floor(x / y)); }
};

// relu(x) - y relu(-x): negative x are multiplied by y.
template <typename T>
struct Prelu {
  static PYCOLLECTIVE_INLINE T value(T x, T y) { return x < 0 ? x * y : x; }
  static PYCOLLECTIVE_INLINE T by_x(T g, T x, T y) { return x > 0 ? g : x < 0 ? g * y : T(0); }
  static PYCOLLECTIVE_INLINE T by_y(T g, T x, T) { return x < 0 ? g * x : T(0); }
};

template <typename Kind, typename T>
PYCOLLECTIVE_INLINE void values_body(const T* __restrict x, const T* __restrict y, T* __restrict z,
                                     Index size) {
  constexpr Index kBlock =
      std::is_same_v<T, float> && requires(int far) { Kind::quick(0.0f, 0.0f, far); } ? 256 : 0;
  if constexpr (kBlock > 0) {
    for (Index first = 0; first < size; first += kBlock) {
      const Index last = std::min(first + kBlock, size);
      int far = 0;
      for (Index i = first; i < last; ++i) z[i] = Kind::quick(x[i], y[i], far);
      for (Index i = first; far && i < last; ++i) z[i] = Kind::value(x[i], y[i]);
    }
  } else {
    for (Index i = 0; i < size; ++i) z[i] = Kind::value(x[i], y[i]);
  }
}

#define PYCOLLECTIVE_BINARY_OF(Kind, T)                                                      \
  PYCOLLECTIVE_CLONES void values_of_##Kind(const T* __restrict x, const T* __restrict y,    \
                                            T* __restrict z, Index size) {                   \
    values_body<Kind<T>>(x, y, z, size);                                                     \
  }                                                                                          \
  PYCOLLECTIVE_CLONES void gradients_of_##Kind(const T* __restrict g, const T* __restrict x, \
                                               const T* __restrict y, T* __restrict dx,      \
                                               T* __restrict dy, Index size) {               \
    for (Index i = 0; dx && i < size; ++i) dx[i] = Kind<T>::by_x(g[i], x[i], y[i]);          \
    for (Index i = 0; dy && i < size; ++i) dy[i] = Kind<T>::by_y(g[i], x[i], y[i]);          \
  }

// clang-format off: it does not support lists without commas
#define PYCOLLECTIVE_BINARIES(X) \
  X("add", Add) X("add_relu", AddRelu) X("subtract", Subtract) X("multiply", Multiply) \
  X("divide", Divide) X("maximum", Maximum) X("minimum", Minimum) \
  X("squared_difference", SquaredDifference) X("mod", Mod) X("prelu", Prelu)
// clang-format on

#define X(name, Kind)                 \
  PYCOLLECTIVE_BINARY_OF(Kind, float) \
  PYCOLLECTIVE_BINARY_OF(Kind, double)
PYCOLLECTIVE_BINARIES(X)
#undef X

#define X(name, Kind) {name, values_of_##Kind, gradients_of_##Kind},
template <typename T>
constexpr Binary<T> kAll[] = {PYCOLLECTIVE_BINARIES(X)};
#undef X

}  // namespace binaries

template <typename T>
const Binary<T>* find_binary(std::string_view name) {
  return find(binaries::kAll<T>, name);
}

#define PYCOLLECTIVE_SELECT(T)                                                                \
  PYCOLLECTIVE_CLONES void select(const std::uint8_t* __restrict mask, const T* __restrict x, \
                                  const T* __restrict y, T* __restrict z, Index size) {       \
    for (Index i = 0; i < size; ++i) z[i] = mask[i] ? x[i] : y[i];                            \
  }
PYCOLLECTIVE_SELECT(float)
PYCOLLECTIVE_SELECT(double)

template const Binary<float>* find_binary<float>(std::string_view);
template const Binary<double>* find_binary<double>(std::string_view);

}  // namespace pycollective::nn
