#include <algorithm>
#include <cmath>

#include "nn/elementary.h"
#include "nn/kernels.h"
#include "support/simd.h"

// An activation is a struct with value(x), and slope(x), the derivative. Both may also take alpha,
// or alpha and beta. To add one, write it here, and name it once at the end.
namespace pycollective::nn {
namespace activations {

template <typename T>
struct Sigmoid {
  static PYCOLLECTIVE_INLINE T value(T x) { return sigmoid_of(x); }
  static PYCOLLECTIVE_INLINE T slope(T x) {
    const T y = sigmoid_of(x);
    return y * (T(1) - y);
  }
};

template <typename T>
struct Tanh {
  static PYCOLLECTIVE_INLINE T value(T x) { return tanh_of(x); }
  static PYCOLLECTIVE_INLINE T slope(T x) {
    const T y = tanh_of(x);
    return (T(1) - y) * (T(1) + y);
  }
};

template <typename T>
struct Softplus {
  static PYCOLLECTIVE_INLINE T value(T x) {
    return (x > 0 ? x : T(0)) + log1p_of_fraction(exp_of(-magnitude_of(x)));
  }
  static PYCOLLECTIVE_INLINE T slope(T x) { return sigmoid_of(x); }
};

template <typename T>
struct Silu {
  static PYCOLLECTIVE_INLINE T value(T x) { return x * sigmoid_of(x); }
  static PYCOLLECTIVE_INLINE T slope(T x) {
    const T s = sigmoid_of(x);
    return s * (T(1) + x * (T(1) - s));
  }
};

// tanh(softplus(x)) = n / (n + 2) with n = e (e + 2) and e = exp(x).
template <typename T>
struct Mish {
  // From here on the quotient is 1.
  static constexpr T kFlat = T(25);
  static PYCOLLECTIVE_INLINE T numerator(T x) {
    const T e = exp_of(x > kFlat ? kFlat : x);
    return e * (e + T(2));
  }
  static PYCOLLECTIVE_INLINE T value(T x) {
    const T n = numerator(x);
    return x * (n / (n + T(2)));
  }
  static PYCOLLECTIVE_INLINE T slope(T x) {
    const T n = numerator(x), inverse = T(1) / (n + T(2));
    const T t = n * inverse;
    const T bounded = x > kFlat ? kFlat : x;  // the second summand falls as exp(-2x)
    return t + bounded * (T(1) + t) * (T(2) * inverse) * sigmoid_of(x);
  }
};

// x times the probability that a standard normal variable is below x.
template <typename T>
struct Gelu {
  static PYCOLLECTIVE_INLINE T bell(T x) { return exp_of(T(-0.5) * x * x); }
  static PYCOLLECTIVE_INLINE T probability(T x, T bell) {
    const T size = magnitude_of(x) * T(0.70710678118654752440);
    const T beyond = T(0.5) * bell * scaled_erfc_of(size);
    return x < 0 ? beyond : T(1) - beyond;
  }
  static PYCOLLECTIVE_INLINE T value(T x) { return x * probability(x, bell(x)); }
  static PYCOLLECTIVE_INLINE T slope(T x) {
    const T density = bell(x);
    return probability(x, density) + x * T(0.39894228040143267794) * density;
  }
};

// The approximation of gelu by tanh.
template <typename T>
struct GeluTanh {
  static constexpr T kScale = T(0.79788456080286535588), kCubic = T(0.044715);
  static PYCOLLECTIVE_INLINE T inner(T x) { return tanh_of(kScale * (x + kCubic * x * x * x)); }
  static PYCOLLECTIVE_INLINE T value(T x) { return T(0.5) * x * (T(1) + inner(x)); }
  static PYCOLLECTIVE_INLINE T slope(T x) {
    const T t = inner(x), rise = kScale * (T(1) + T(3) * kCubic * x * x);
    return T(0.5) * (T(1) + t + x * (T(1) - t) * (T(1) + t) * rise);
  }
};

template <typename T>
struct Softsign {
  static PYCOLLECTIVE_INLINE T value(T x) { return x / (T(1) + magnitude_of(x)); }
  static PYCOLLECTIVE_INLINE T slope(T x) {
    const T y = T(1) / (T(1) + magnitude_of(x));
    return y * y;
  }
};

template <typename T>
struct Relu6 {
  static PYCOLLECTIVE_INLINE T value(T x) { return x < 0 ? T(0) : x > 6 ? T(6) : x; }
  static PYCOLLECTIVE_INLINE T slope(T x) { return x > 0 && x < 6 ? T(1) : T(0); }
};

template <typename T>
struct HardSigmoid {
  static PYCOLLECTIVE_INLINE T value(T x) {
    const T y = x / T(6) + T(0.5);
    return y < 0 ? T(0) : y > 1 ? T(1) : y;
  }
  static PYCOLLECTIVE_INLINE T slope(T x) { return x > -3 && x < 3 ? T(1) / T(6) : T(0); }
};

template <typename T>
struct HardSilu {
  static PYCOLLECTIVE_INLINE T value(T x) { return x * HardSigmoid<T>::value(x); }
  static PYCOLLECTIVE_INLINE T slope(T x) {
    return HardSigmoid<T>::value(x) + x * HardSigmoid<T>::slope(x);
  }
};

template <typename T>
struct Erf {
  static PYCOLLECTIVE_INLINE T value(T x) { return erf_of(x); }
  static PYCOLLECTIVE_INLINE T slope(T x) { return T(1.12837916709551257390) * exp_of(-x * x); }
};

template <typename T>
struct Elu {
  // Not x < 0, so that NaN stays NaN.
  static PYCOLLECTIVE_INLINE T negative(T x) { return x > 0 ? T(0) : x; }
  static PYCOLLECTIVE_INLINE T value(T x, T alpha) {
    const T below = alpha * expm1_of_negative(negative(x));
    return x > 0 ? x : below;
  }
  static PYCOLLECTIVE_INLINE T slope(T x, T alpha) {
    const T below = alpha * exp_of(negative(x));
    return x > 0 ? T(1) : below;
  }
};

template <typename T>
struct Selu {
  static constexpr T kAlpha = T(1.6732632423543772848), kScale = T(1.0507009873554804934);
  static PYCOLLECTIVE_INLINE T value(T x) { return kScale * Elu<T>::value(x, kAlpha); }
  static PYCOLLECTIVE_INLINE T slope(T x) {
    const T below = kScale * Elu<T>::slope(x, kAlpha);
    return x >= 0 ? kScale : below;
  }
};

template <typename T>
struct LeakyRelu {
  static PYCOLLECTIVE_INLINE T value(T x, T alpha) { return x > 0 ? x : alpha * x; }
  static PYCOLLECTIVE_INLINE T slope(T x, T alpha) { return x > 0 ? T(1) : alpha; }
};

template <typename T>
struct Relu {
  // Not x > 0, so that NaN stays NaN.
  static PYCOLLECTIVE_INLINE T value(T x) { return x < 0 ? T(0) : x; }
  static PYCOLLECTIVE_INLINE T slope(T x) { return x > 0 ? T(1) : T(0); }
};

template <typename T>
struct Exp {
  static PYCOLLECTIVE_INLINE T value(T x) { return exp_of(x); }
  static PYCOLLECTIVE_INLINE T slope(T x) { return exp_of(x); }
};

template <typename T>
struct Log {
  static PYCOLLECTIVE_INLINE T value(T x) { return log_of(x); }
  static PYCOLLECTIVE_INLINE T slope(T x) { return T(1) / x; }
};

template <typename T>
struct Log1p {
  static PYCOLLECTIVE_INLINE T value(T x) { return log1p_of(x); }
  static PYCOLLECTIVE_INLINE T slope(T x) { return T(1) / (T(1) + x); }
};

template <typename T>
struct Sqrt {
  static constexpr bool kZeroForZero = true;
  static PYCOLLECTIVE_INLINE T value(T x) { return std::sqrt(x); }
  static PYCOLLECTIVE_INLINE T slope(T x) { return T(0.5) / std::sqrt(x); }
};

template <typename T>
struct Rsqrt {
  static constexpr bool kZeroForZero = true;
  static PYCOLLECTIVE_INLINE T value(T x) { return T(1) / std::sqrt(x); }
  static PYCOLLECTIVE_INLINE T slope(T x) { return T(-0.5) / (x * std::sqrt(x)); }
};

template <typename T>
struct Reciprocal {
  static constexpr bool kZeroForZero = true;
  static PYCOLLECTIVE_INLINE T value(T x) { return T(1) / x; }
  static PYCOLLECTIVE_INLINE T slope(T x) { return -(T(1) / x) * (T(1) / x); }
};

template <typename T>
struct Square {
  static PYCOLLECTIVE_INLINE T value(T x) { return x * x; }
  static PYCOLLECTIVE_INLINE T slope(T x) { return x + x; }
};

template <typename T>
struct Abs {
  static PYCOLLECTIVE_INLINE T value(T x) { return std::abs(x); }
  static PYCOLLECTIVE_INLINE T slope(T x) { return x > 0 ? T(1) : x < 0 ? T(-1) : x; }
};

template <typename T>
struct Negative {
  static PYCOLLECTIVE_INLINE T value(T x) { return -x; }
  static PYCOLLECTIVE_INLINE T slope(T) { return T(-1); }
};

// by_blocks uses Exact for blocks that have a number of magnitude kFar or more.
template <typename T>
struct Sin {
  struct Exact {
    static T value(T x) { return std::sin(x); }
    static T slope(T x) { return std::cos(x); }
  };
  static PYCOLLECTIVE_INLINE T value(T x) { return sine_of(x, 0); }
  static PYCOLLECTIVE_INLINE T slope(T x) { return sine_of(x, 1); }
};

template <typename T>
struct Cos {
  struct Exact {
    static T value(T x) { return std::cos(x); }
    static T slope(T x) { return -std::sin(x); }
  };
  static PYCOLLECTIVE_INLINE T value(T x) { return sine_of(x, 1); }
  static PYCOLLECTIVE_INLINE T slope(T x) { return sine_of(x, 2); }
};

// Limits x to alpha and beta. NaN stays NaN.
template <typename T>
struct Clip {
  static PYCOLLECTIVE_INLINE T value(T x, T alpha, T beta) {
    const T above = x < alpha ? alpha : x;
    return above > beta ? beta : above;
  }
  static PYCOLLECTIVE_INLINE T slope(T x, T alpha, T beta) {
    return x >= alpha && x <= beta ? T(1) : T(0);
  }
};

template <typename Kind, typename T>
PYCOLLECTIVE_INLINE void values_loop(const T* __restrict x, [[maybe_unused]] T alpha,
                                     [[maybe_unused]] T beta, T* __restrict y, Index size) {
  for (Index i = 0; i < size; ++i) {
    if constexpr (requires { Kind::value(x[i], alpha, beta); }) {
      y[i] = Kind::value(x[i], alpha, beta);
    } else if constexpr (requires { Kind::value(x[i], alpha); }) {
      y[i] = Kind::value(x[i], alpha);
    } else {
      y[i] = Kind::value(x[i]);
    }
  }
}
template <typename Kind, typename T>
PYCOLLECTIVE_INLINE void gradients_loop(const T* __restrict g, const T* __restrict x,
                                        [[maybe_unused]] T alpha, [[maybe_unused]] T beta,
                                        T* __restrict dx, Index size) {
  for (Index i = 0; i < size; ++i) {
    if constexpr (requires { Kind::slope(x[i], alpha, beta); }) {
      dx[i] = g[i] * Kind::slope(x[i], alpha, beta);
    } else if constexpr (requires { Kind::slope(x[i], alpha); }) {
      dx[i] = g[i] * Kind::slope(x[i], alpha);
    } else if constexpr (requires { Kind::kZeroForZero; }) {
      // As in TensorFlow: 0 and not NaN where the slope is infinite but x was masked.
      dx[i] = g[i] == 0 ? g[i] : g[i] * Kind::slope(x[i]);
    } else {
      dx[i] = g[i] * Kind::slope(x[i]);
    }
  }
}

// Calls loop(kind, first, size). A kind with Exact is called by blocks.
template <typename Kind, typename T, typename Loop>
PYCOLLECTIVE_INLINE void by_blocks(const T* x, Index size, const Loop& loop) {
  if constexpr (requires { typename Kind::Exact; }) {
    constexpr Index kBlock = 256;
    for (Index first = 0; first < size; first += kBlock) {
      const Index some = std::min(kBlock, size - first);
      int far = 0;
      for (Index i = 0; i < some; ++i) far |= !(magnitude_of(x[first + i]) < kFar<T>);
      if (far) {
        loop(typename Kind::Exact{}, first, some);
      } else {
        loop(Kind{}, first, some);
      }
    }
  } else {
    loop(Kind{}, 0, size);
  }
}

#define PYCOLLECTIVE_ACTIVATION_OF(Kind, T)                                                     \
  PYCOLLECTIVE_CLONES void values_of_##Kind(const T* x, T alpha, T beta, T* y, Index size) {    \
    by_blocks<Kind<T>>(x, size,                                                                 \
                       [&](auto kind, Index first, Index some) __attribute__((always_inline)) { \
                         values_loop<decltype(kind)>(x + first, alpha, beta, y + first, some);  \
                       });                                                                      \
  }                                                                                             \
  PYCOLLECTIVE_CLONES void gradients_of_##Kind(const T* g, const T* x, T alpha, T beta, T* dx,  \
                                               Index size) {                                    \
    by_blocks<Kind<T>>(                                                                         \
        x, size, [&](auto kind, Index first, Index some) __attribute__((always_inline)) {       \
          gradients_loop<decltype(kind)>(g + first, x + first, alpha, beta, dx + first, some);  \
        });                                                                                     \
  }
// clang-format off: it does not support lists without commas
#define PYCOLLECTIVE_ACTIVATIONS(X) \
  X("sigmoid", Sigmoid) X("tanh", Tanh) X("softplus", Softplus) X("silu", Silu) X("mish", Mish) \
  X("gelu", Gelu) X("gelu_tanh", GeluTanh) X("softsign", Softsign) X("relu6", Relu6) \
  X("hard_sigmoid", HardSigmoid) X("hard_silu", HardSilu) X("erf", Erf) X("elu", Elu) \
  X("selu", Selu) X("leaky_relu", LeakyRelu) X("relu", Relu) X("exp", Exp) X("log", Log) \
  X("log1p", Log1p) X("sqrt", Sqrt) X("rsqrt", Rsqrt) X("reciprocal", Reciprocal) \
  X("square", Square) X("abs", Abs) X("negative", Negative) X("sin", Sin) X("cos", Cos) \
  X("clip", Clip)
// clang-format on

#define X(name, Kind)                     \
  PYCOLLECTIVE_ACTIVATION_OF(Kind, float) \
  PYCOLLECTIVE_ACTIVATION_OF(Kind, double)
PYCOLLECTIVE_ACTIVATIONS(X)
#undef X

#define X(name, Kind) {name, values_of_##Kind, gradients_of_##Kind},
template <typename T>
constexpr Activation<T> kAll[] = {PYCOLLECTIVE_ACTIVATIONS(X)};
#undef X

}  // namespace activations

template <typename T>
const Activation<T>* find_activation(std::string_view name) {
  return find(activations::kAll<T>, name);
}

template const Activation<float>* find_activation<float>(std::string_view);
template const Activation<double>* find_activation<double>(std::string_view);

}  // namespace pycollective::nn
