// Softmax of rows, its logarithm, and the cross-entropy.
#include <algorithm>
#include <cmath>

#include "nn/elementary.h"
#include "nn/kernels.h"
#include "support/simd.h"

namespace pycollective::nn {
namespace {

// Sums are in lanes, in a fixed order: the compiler may not reorder one sum.
constexpr Index kLanes = 32;

template <typename T>
PYCOLLECTIVE_INLINE T folded(T (&sums)[kLanes]) {
  for (Index half = kLanes / 2; half > 0; half /= 2) {
    for (Index l = 0; l < half; ++l) sums[l] += sums[l + half];
  }
  return sums[0];
}

// The sum of term(c) for all classes c. `term` may write arrays.
template <typename T, typename Term>
PYCOLLECTIVE_INLINE T sum_of(Index classes, const Term& term) {
  T sums[kLanes] = {};
  Index c = 0;
  for (; c + kLanes <= classes; c += kLanes) {
    PYCOLLECTIVE_INDEPENDENT
    for (Index l = 0; l < kLanes; ++l) sums[l] += term(c + l);
  }
  for (Index l = 0; c + l < classes; ++l) sums[l] += term(c + l);
  return folded(sums);
}

// The maximum; NaN counts as less than every number, unless it is the first.
template <typename T>
PYCOLLECTIVE_INLINE T maximum_of(const T* __restrict x, Index classes) {
  T top[kLanes];
  for (Index l = 0; l < kLanes; ++l) top[l] = x[0];
  Index c = 0;
  for (; c + kLanes <= classes; c += kLanes) {
    for (Index l = 0; l < kLanes; ++l) top[l] = x[c + l] > top[l] ? x[c + l] : top[l];
  }
  for (; c < classes; ++c) top[0] = x[c] > top[0] ? x[c] : top[0];
  for (Index l = 1; l < kLanes; ++l) top[0] = top[l] > top[0] ? top[l] : top[0];
  return top[0];
}

template <typename T>
PYCOLLECTIVE_INLINE void softmax_body(const T* __restrict x, T* __restrict y, Index rows,
                                      Index classes, bool logarithm) {
  for (Index r = 0; r < rows; ++r, x += classes, y += classes) {
    const T most = maximum_of(x, classes);
    if (logarithm) {
      const T shift = std::log(sum_of<T>(classes, [&](Index c) { return exp_of(x[c] - most); }));
      for (Index c = 0; c < classes; ++c) y[c] = (x[c] - most) - shift;
    } else {
      const T sum = sum_of<T>(classes, [&](Index c) { return y[c] = exp_of(x[c] - most); });
      const T scale = T(1) / sum;
      for (Index c = 0; c < classes; ++c) y[c] *= scale;
    }
  }
}

template <typename T>
PYCOLLECTIVE_INLINE void softmax_gradient_body(const T* __restrict g, const T* __restrict y,
                                               T* __restrict dx, Index rows, Index classes,
                                               bool logarithm) {
  for (Index r = 0; r < rows; ++r, g += classes, y += classes, dx += classes) {
    if (logarithm) {
      const T sum = sum_of<T>(classes, [&](Index c) { return g[c]; });
      for (Index c = 0; c < classes; ++c) dx[c] = g[c] - exp_of(y[c]) * sum;
    } else {
      const T sum = sum_of<T>(classes, [&](Index c) { return g[c] * y[c]; });
      for (Index c = 0; c < classes; ++c) dx[c] = y[c] * (g[c] - sum);
    }
  }
}

template <typename T>
PYCOLLECTIVE_INLINE void softmax_cross_entropy_body(const T* __restrict logits,
                                                    const Index* __restrict labels,
                                                    T* __restrict losses, T* __restrict gradient,
                                                    Index rows, Index classes) {
  for (Index r = 0; r < rows; ++r, logits += classes) {
    const T most = maximum_of(logits, classes);
    const T sum = sum_of<T>(classes, [&](Index c) {
      const T e = exp_of(logits[c] - most);
      if (gradient) gradient[c] = e;
      return e;
    });
    losses[r] = std::log(sum) - (logits[labels[r]] - most);
    if (gradient) {
      const T scale = T(1) / sum;
      for (Index c = 0; c < classes; ++c) gradient[c] *= scale;
      gradient[labels[r]] -= T(1);
      gradient += classes;
    }
  }
}

}  // namespace

#define PYCOLLECTIVE_SOFTMAX(T)                                                                   \
  PYCOLLECTIVE_CLONES void softmax(const T* x, T* y, Index rows, Index classes, bool logarithm) { \
    softmax_body(x, y, rows, classes, logarithm);                                                 \
  }                                                                                               \
  PYCOLLECTIVE_CLONES void softmax_gradient(const T* g, const T* y, T* dx, Index rows,            \
                                            Index classes, bool logarithm) {                      \
    softmax_gradient_body(g, y, dx, rows, classes, logarithm);                                    \
  }                                                                                               \
  PYCOLLECTIVE_CLONES void softmax_cross_entropy(const T* logits, const Index* labels, T* losses, \
                                                 T* gradient, Index rows, Index classes) {        \
    softmax_cross_entropy_body(logits, labels, losses, gradient, rows, classes);                  \
  }

PYCOLLECTIVE_SOFTMAX(float)
PYCOLLECTIVE_SOFTMAX(double)

}  // namespace pycollective::nn
