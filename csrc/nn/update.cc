#include <cmath>

#include "nn/kernels.h"
#include "support/simd.h"

namespace pycollective::nn {
namespace {

template <typename T>
PYCOLLECTIVE_INLINE void adam_body(T* __restrict p, const T* __restrict g, T* __restrict m,
                                   T* __restrict v, Index n, T alpha, T rest1, T rest2, T epsilon) {
  for (Index i = 0; i < n; ++i) {
    const T first = m[i] + (g[i] - m[i]) * rest1;
    const T second = v[i] + (g[i] * g[i] - v[i]) * rest2;
    m[i] = first;
    v[i] = second;
    p[i] -= alpha * first / (std::sqrt(second) + epsilon);
  }
}

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

template <typename T>
PYCOLLECTIVE_INLINE void adagrad_body(T* __restrict p, const T* __restrict g, T* __restrict a,
                                      Index n, T rate, T epsilon) {
  for (Index i = 0; i < n; ++i) {
    const T sum = a[i] + g[i] * g[i];
    a[i] = sum;
    p[i] -= rate * g[i] / std::sqrt(sum + epsilon);
  }
}

}  // namespace

#define PYCOLLECTIVE_UPDATE(T)                                                                   \
  PYCOLLECTIVE_CLONES void adam_update(T* p, const T* g, T* m, T* v, Index n, double alpha,      \
                                       double beta1, double beta2, double epsilon) {             \
    adam_body(p, g, m, v, n, T(alpha), T(1 - beta1), T(1 - beta2), T(epsilon));                  \
  }                                                                                              \
  PYCOLLECTIVE_CLONES void sgd_update(T* p, const T* g, T* velocity, Index n, double rate,       \
                                      double momentum, bool nesterov) {                          \
    sgd_body(p, g, velocity, n, T(rate), T(momentum), nesterov);                                 \
  }                                                                                              \
  PYCOLLECTIVE_CLONES void rmsprop_update(T* p, const T* g, T* v, T* mean, T* speed, Index n,    \
                                          double rate, double rho, double momentum,              \
                                          double epsilon) {                                      \
    rmsprop_body(p, g, v, mean, speed, n, T(rate), T(rho), T(1 - rho), T(momentum), T(epsilon)); \
  }                                                                                              \
  PYCOLLECTIVE_CLONES void adagrad_update(T* p, const T* g, T* a, Index n, double rate,          \
                                          double epsilon) {                                      \
    adagrad_body(p, g, a, n, T(rate), T(epsilon));                                               \
  }

PYCOLLECTIVE_UPDATE(float)
PYCOLLECTIVE_UPDATE(double)

}  // namespace pycollective::nn
