#include <cmath>

#include "nn/kernels.h"
#include "support/simd.h"

namespace pycollective::nn {
namespace {

// A rule is a struct with step(g, m, v, c). step() updates the slots m and v of one parameter, and
// returns the step that is subtracted from the parameter. To add one, write it here, and name it
// once at the end.
template <typename T>
struct Adam {
  static constexpr int kSlots = 2, kNumbers = 4;
  static PYCOLLECTIVE_INLINE T step(T g, T& m, T& v, const T* c) {
    m += (g - m) * c[1];
    v += (g * g - v) * c[2];
    return c[0] * m / (std::sqrt(v) + c[3]);
  }
};

template <typename T>
struct Nadam {
  static constexpr int kSlots = 2, kNumbers = 6;
  static PYCOLLECTIVE_INLINE T step(T g, T& m, T& v, const T* c) {
    m += (g - m) * c[2];
    v += (g * g - v) * c[3];
    return (c[0] * m + c[1] * g) / (std::sqrt(v * c[4]) + c[5]);
  }
};

template <typename T>
struct Adamax {
  static constexpr int kSlots = 2, kNumbers = 4;
  static PYCOLLECTIVE_INLINE T step(T g, T& m, T& u, const T* c) {
    m += (g - m) * c[1];
    const T decayed = u * c[2], size = std::abs(g);
    u = decayed >= size || decayed != decayed ? decayed : size;
    return c[0] * m / (u + c[3]);
  }
};

template <typename T>
struct Adadelta {
  static constexpr int kSlots = 2, kNumbers = 4;
  static PYCOLLECTIVE_INLINE T step(T g, T& a, T& b, const T* c) {
    a = c[1] * a + c[2] * g * g;
    const T delta = std::sqrt(b + c[3]) * g / std::sqrt(a + c[3]);
    b = c[1] * b + c[2] * delta * delta;
    return c[0] * delta;
  }
};

template <typename T>
struct Adagrad {
  static constexpr int kSlots = 1, kNumbers = 2;
  static PYCOLLECTIVE_INLINE T step(T g, T& a, T&, const T* c) {
    a += g * g;
    return c[0] * g / std::sqrt(a + c[1]);
  }
};

template <typename T>
PYCOLLECTIVE_INLINE void sgd_body(T* __restrict p, const T* __restrict g, T* __restrict velocity,
                                  Index n, T rate, T momentum, bool nesterov) {
  if (!velocity) {
    for (Index i = 0; i < n; ++i) p[i] -= rate * g[i];
  } else if (nesterov) {
    for (Index i = 0; i < n; ++i) {
      const T step = rate * g[i];
      velocity[i] = momentum * velocity[i] - step;
      p[i] += momentum * velocity[i] - step;
    }
  } else {
    for (Index i = 0; i < n; ++i) {
      velocity[i] = momentum * velocity[i] - rate * g[i];
      p[i] += velocity[i];
    }
  }
}

// One loop for each case, so that the compiler vectorizes each of them.
template <bool kCentered, bool kMomentum, typename T>
PYCOLLECTIVE_INLINE void rmsprop_loop(T* __restrict p, const T* __restrict g, T* __restrict v,
                                      T* __restrict mean, T* __restrict speed, Index n, T rate,
                                      T rho, T rest, T momentum, T epsilon) {
  for (Index i = 0; i < n; ++i) {
    const T square = rho * v[i] + rest * g[i] * g[i];
    v[i] = square;
    T spread = square + epsilon;
    if constexpr (kCentered) {
      const T first = rho * mean[i] + rest * g[i];
      mean[i] = first;
      spread -= first * first;
    }
    T step = rate * g[i] / std::sqrt(spread);
    if constexpr (kMomentum) {
      step += momentum * speed[i];
      speed[i] = step;
    }
    p[i] -= step;
  }
}

template <typename T>
PYCOLLECTIVE_INLINE void rmsprop_body(T* p, const T* g, T* v, T* mean, T* speed, Index n, T rate,
                                      T rho, T rest, T momentum, T epsilon) {
  if (mean && speed) {
    rmsprop_loop<true, true>(p, g, v, mean, speed, n, rate, rho, rest, momentum, epsilon);
  } else if (mean) {
    rmsprop_loop<true, false>(p, g, v, mean, speed, n, rate, rho, rest, momentum, epsilon);
  } else if (speed) {
    rmsprop_loop<false, true>(p, g, v, mean, speed, n, rate, rho, rest, momentum, epsilon);
  } else {
    rmsprop_loop<false, false>(p, g, v, mean, speed, n, rate, rho, rest, momentum, epsilon);
  }
}

}  // namespace

#define PYCOLLECTIVE_RULE_OF(Kind, T)                                                 \
  PYCOLLECTIVE_CLONES void steps_of_##Kind(T* __restrict p, const T* __restrict g,    \
                                           T* __restrict m, T* __restrict v, Index n, \
                                           const T* __restrict c) {                   \
    for (Index i = 0; i < n; ++i) {                                                   \
      T first = m[i], second = Kind<T>::kSlots == 2 ? v[i] : T(0);                    \
      p[i] -= Kind<T>::step(g[i], first, second, c);                                  \
      m[i] = first;                                                                   \
      if constexpr (Kind<T>::kSlots == 2) v[i] = second;                              \
    }                                                                                 \
  }

#define PYCOLLECTIVE_UPDATE(T)                                                                   \
  PYCOLLECTIVE_CLONES void sgd_update(T* p, const T* g, T* velocity, Index n, double rate,       \
                                      double momentum, bool nesterov) {                          \
    sgd_body(p, g, velocity, n, T(rate), T(momentum), nesterov);                                 \
  }                                                                                              \
  PYCOLLECTIVE_CLONES void rmsprop_update(T* p, const T* g, T* v, T* mean, T* speed, Index n,    \
                                          double rate, double rho, double momentum,              \
                                          double epsilon) {                                      \
    rmsprop_body(p, g, v, mean, speed, n, T(rate), T(rho), T(1 - rho), T(momentum), T(epsilon)); \
  }

PYCOLLECTIVE_UPDATE(float)
PYCOLLECTIVE_UPDATE(double)

// clang-format off: it does not support lists without commas
#define PYCOLLECTIVE_RULES(X) \
  X("adam", Adam) X("nadam", Nadam) X("adamax", Adamax) X("adadelta", Adadelta) \
  X("adagrad", Adagrad)
// clang-format on

namespace {

#define X(name, Kind)               \
  PYCOLLECTIVE_RULE_OF(Kind, float) \
  PYCOLLECTIVE_RULE_OF(Kind, double)
PYCOLLECTIVE_RULES(X)
#undef X

#define X(name, Kind) {name, Kind<T>::kSlots, Kind<T>::kNumbers, steps_of_##Kind},
template <typename T>
constexpr Rule<T> kAll[] = {PYCOLLECTIVE_RULES(X)};
#undef X

}  // namespace

template <typename T>
const Rule<T>* find_rule(std::string_view name) {
  return find(kAll<T>, name);
}

template const Rule<float>* find_rule<float>(std::string_view);
template const Rule<double>* find_rule<double>(std::string_view);

}  // namespace pycollective::nn
