#include <algorithm>

#include "nn/kernels.h"
#include "support/simd.h"

namespace pycollective::nn {
namespace {

template <typename T, bool kBias, bool kRelu>
PYCOLLECTIVE_INLINE void add_and_cut(T* __restrict z, const T* __restrict bias, Index rows,
                                     Index channels) {
  for (Index r = 0; r < rows; ++r, z += channels) {
    for (Index c = 0; c < channels; ++c) {
      T value = z[c];
      if (kBias) value += bias[c];
      if (kRelu) value = value < 0 ? T{0} : value;
      z[c] = value;
    }
  }
}

template <typename T>
PYCOLLECTIVE_INLINE void bias_relu_body(T* z, const T* bias, Index rows, Index channels,
                                        bool relu) {
  if (bias && relu) add_and_cut<T, true, true>(z, bias, rows, channels);
  if (bias && !relu) add_and_cut<T, true, false>(z, bias, rows, channels);
  // Without a bias, all rows are processed as one row.
  if (!bias && relu) add_and_cut<T, false, true>(z, bias, 1, rows * channels);
}

template <typename T>
PYCOLLECTIVE_INLINE void relu_gradient_body(const T* __restrict g, const T* __restrict y,
                                            T* __restrict dz, T* __restrict bias_gradient,
                                            Index rows, Index channels) {
  if (!bias_gradient) {
    channels *= rows;
    rows = 1;
  }
  for (Index r = 0; r < rows; ++r) {
    const Index o = r * channels;
    if (dz) {
      for (Index c = 0; c < channels; ++c) dz[o + c] = !y || y[o + c] > 0 ? g[o + c] : T{0};
    }
    if (bias_gradient) {
      for (Index c = 0; c < channels; ++c) {
        bias_gradient[c] += !y || y[o + c] > 0 ? g[o + c] : T{0};
      }
    }
  }
}

template <typename T>
PYCOLLECTIVE_INLINE void add_multiple_body(const T* __restrict x, T factor, const T* y, T* z,
                                           Index size) {
#pragma GCC ivdep
  for (Index i = 0; i < size; ++i) z[i] = y[i] + factor * x[i];
}

template <typename T>
PYCOLLECTIVE_INLINE T sum_of_squares_body(const T* __restrict x, Index size) {
  // Separate lanes, because the compiler may not split one sum. Blocks keep rounding errors small.
  constexpr Index kLanes = 64, kBlock = 1 << 12;
  double total = 0;
  for (Index first = 0; first < size; first += kBlock) {
    const Index last = std::min(first + kBlock, size);
    T sums[kLanes] = {};
    Index i = first;
    for (; i + kLanes <= last; i += kLanes) {
      for (Index l = 0; l < kLanes; ++l) sums[l] += x[i + l] * x[i + l];
    }
    for (; i < last; ++i) sums[0] += x[i] * x[i];
    for (Index l = 0; l < kLanes; ++l) total += static_cast<double>(sums[l]);
  }
  return static_cast<T>(total);
}

}  // namespace

#define PYCOLLECTIVE_POINTWISE(T)                                                                  \
  PYCOLLECTIVE_CLONES T sum_of_squares(const T* x, Index size) {                                   \
    return sum_of_squares_body(x, size);                                                           \
  }                                                                                                \
  PYCOLLECTIVE_CLONES void add_multiple(const T* x, double factor, const T* y, T* z, Index size) { \
    add_multiple_body(x, T(factor), y, z, size);                                                   \
  }                                                                                                \
  PYCOLLECTIVE_CLONES void bias_relu(T* z, const T* bias, Index rows, Index channels, bool relu) { \
    bias_relu_body(z, bias, rows, channels, relu);                                                 \
  }                                                                                                \
  PYCOLLECTIVE_CLONES void relu_gradient(const T* g, const T* y, T* dz, T* bias_gradient,          \
                                         Index rows, Index channels) {                             \
    relu_gradient_body(g, y, dz, bias_gradient, rows, channels);                                   \
  }

PYCOLLECTIVE_POINTWISE(float)
PYCOLLECTIVE_POINTWISE(double)

}  // namespace pycollective::nn
