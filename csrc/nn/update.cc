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

}  // namespace

#define PYCOLLECTIVE_UPDATE(T)                                                              \
  PYCOLLECTIVE_CLONES void adam_update(T* p, const T* g, T* m, T* v, Index n, double alpha, \
                                       double beta1, double beta2, double epsilon) {        \
    adam_body(p, g, m, v, n, T(alpha), T(1 - beta1), T(1 - beta2), T(epsilon));             \
  }                                                                                         \
  PYCOLLECTIVE_CLONES void sgd_update(T* p, const T* g, T* velocity, Index n, double rate,  \
                                      double momentum, bool nesterov) {                     \
    sgd_body(p, g, velocity, n, T(rate), T(momentum), nesterov);                            \
  }

PYCOLLECTIVE_UPDATE(float)
PYCOLLECTIVE_UPDATE(double)

}  // namespace pycollective::nn
