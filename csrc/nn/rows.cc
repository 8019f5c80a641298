// Operations on rows: softmax, its logarithm, cross-entropy, layer normalization.
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

template <typename T>
PYCOLLECTIVE_INLINE void normalize_rows_body(const T* __restrict x, const T* __restrict factor,
                                             const T* __restrict shift, T* __restrict y,
                                             T* __restrict means, T* __restrict inverses,
                                             Index rows, Index size, T epsilon) {
  const T share = T(1) / static_cast<T>(size);
  for (Index r = 0; r < rows; ++r, x += size, y += size) {
    const T mean = sum_of<T>(size, [&](Index c) { return x[c]; }) * share;
    const T squares = sum_of<T>(size, [&](Index c) { return (x[c] - mean) * (x[c] - mean); });
    const T inverse = T(1) / std::sqrt(squares * share + epsilon);
    for (Index c = 0; c < size; ++c) y[c] = (x[c] - mean) * inverse * factor[c] + shift[c];
    means[r] = mean;
    inverses[r] = inverse;
  }
}

template <typename T>
PYCOLLECTIVE_INLINE void normalize_rows_gradient_body(
    const T* __restrict g, const T* __restrict x, const T* __restrict factor,
    const T* __restrict means, const T* __restrict inverses, T* __restrict dx,
    T* __restrict by_factor, T* __restrict by_shift, Index rows, Index size) {
  const T share = T(1) / static_cast<T>(size);
  for (Index r = 0; r < rows; ++r, g += size, x += size, dx += size) {
    const T mean = means[r], inverse = inverses[r];
    const T sum = sum_of<T>(size, [&](Index c) { return g[c] * factor[c]; }) * share;
    const T along = sum_of<T>(size, [&](Index c) { return g[c] * factor[c] * (x[c] - mean); }) *
                    inverse * inverse * share;
    for (Index c = 0; c < size; ++c) {
      dx[c] = inverse * (g[c] * factor[c] - sum - (x[c] - mean) * along);
      by_factor[c] += g[c] * ((x[c] - mean) * inverse);
      by_shift[c] += g[c];
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
  }                                                                                               \
  PYCOLLECTIVE_CLONES void normalize_rows(const T* x, const T* factor, const T* shift, T* y,      \
                                          T* means, T* inverses, Index rows, Index size,          \
                                          double epsilon) {                                       \
    normalize_rows_body(x, factor, shift, y, means, inverses, rows, size, T(epsilon));            \
  }                                                                                               \
  PYCOLLECTIVE_CLONES void normalize_rows_gradient(                                               \
      const T* g, const T* x, const T* factor, const T* means, const T* inverses, T* dx,          \
      T* by_factor, T* by_shift, Index rows, Index size) {                                        \
    normalize_rows_gradient_body(g, x, factor, means, inverses, dx, by_factor, by_shift, rows,    \
                                 size);                                                           \
  }

PYCOLLECTIVE_SOFTMAX(float)
PYCOLLECTIVE_SOFTMAX(double)

}  // namespace pycollective::nn
