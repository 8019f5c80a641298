#include <algorithm>
#include <bit>
#include <cmath>

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
PYCOLLECTIVE_INLINE void relu_body(const T* __restrict x, T* __restrict y, Index size) {
  for (Index i = 0; i < size; ++i) y[i] = x[i] < 0 ? T{0} : x[i];
}

template <typename T>
PYCOLLECTIVE_INLINE void add_relu_body(const T* __restrict x, const T* __restrict y,
                                       T* __restrict z, Index size) {
  for (Index i = 0; i < size; ++i) {
    const T sum = x[i] + y[i];
    z[i] = sum < 0 ? T{0} : sum;
  }
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

// exp(x) for x <= 0, with operations that compilers vectorize: x = k ln2 + r, |r| <= ln2 / 2; a
// Taylor polynomial of r times a power of two that is assembled from bits. The error is about one
// unit in the last place. Below `kLowest` the result would be subnormal and is 0. NaN gives NaN.
template <typename T>
struct ExpConstants;
template <>
struct ExpConstants<float> {
  using Bits = std::int32_t;
  static constexpr float kLowest = -87.0f, kRound = 0x1.8p23f;
  static constexpr float kLn2High = 0x1.62ep-1f, kLn2Low = 0x1.0bfbe8p-15f;
  static constexpr int kMantissa = 23, kDegree = 7;
  static constexpr Bits kExponentBias = 127;
};
template <>
struct ExpConstants<double> {
  using Bits = std::int64_t;
  static constexpr double kLowest = -708.0, kRound = 0x1.8p52;
  static constexpr double kLn2High = 0x1.62e42feep-1, kLn2Low = 0x1.a39ef35793c76p-33;
  static constexpr int kMantissa = 52, kDegree = 13;
  static constexpr Bits kExponentBias = 1023;
};

template <typename T>
PYCOLLECTIVE_INLINE T exp_of_negative(T x) {
  using E = ExpConstants<T>;
  using Bits = typename E::Bits;
  const T clipped = x < E::kLowest ? E::kLowest : x;
  // Adding 1.5 * 2^mantissa rounds to an integer in the low bits.
  const T shifted = clipped * T(1.4426950408889634074) + E::kRound;
  const T k = shifted - E::kRound;
  const T r = (clipped - k * E::kLn2High) - k * E::kLn2Low;
  T sum = 1;
  for (int i = E::kDegree; i > 0; --i) sum = sum * (r * (T(1) / T(i))) + T(1);
  const Bits integer = std::bit_cast<Bits>(shifted) - std::bit_cast<Bits>(E::kRound);
  const T power = std::bit_cast<T>((integer + E::kExponentBias) << E::kMantissa);
  return x < E::kLowest ? T{0} : sum * power;
}

template <typename T>
PYCOLLECTIVE_INLINE void softmax_cross_entropy_body(const T* __restrict logits,
                                                    const Index* __restrict labels,
                                                    T* __restrict losses, T* __restrict gradient,
                                                    Index rows, Index classes) {
  // Sums in 16 lanes, in a fixed order: the compiler may not reorder one sum.
  constexpr Index kLanes = 16;
  for (Index r = 0; r < rows; ++r, logits += classes) {
    T top[kLanes], sums[kLanes];
    for (Index l = 0; l < kLanes; ++l) {
      top[l] = logits[0];
      sums[l] = 0;
    }
    const Index whole = classes - classes % kLanes;
    for (Index c = 0; c < whole; c += kLanes) {
      for (Index l = 0; l < kLanes; ++l) top[l] = std::max(top[l], logits[c + l]);
    }
    for (Index c = whole; c < classes; ++c) top[0] = std::max(top[0], logits[c]);
    for (Index l = 1; l < kLanes; ++l) top[0] = std::max(top[0], top[l]);
    const T most = top[0];
    for (Index c = 0; c < whole; c += kLanes) {
      for (Index l = 0; l < kLanes; ++l) {
        const T e = exp_of_negative(logits[c + l] - most);
        sums[l] += e;
        if (gradient) gradient[c + l] = e;
      }
    }
    for (Index c = whole; c < classes; ++c) {
      const T e = exp_of_negative(logits[c] - most);
      sums[c - whole] += e;
      if (gradient) gradient[c] = e;
    }
    T sum = 0;
    for (Index l = 0; l < kLanes; ++l) sum += sums[l];
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

#define PYCOLLECTIVE_POINTWISE(T)                                                                  \
  PYCOLLECTIVE_CLONES T sum_of_squares(const T* x, Index size) {                                   \
    return sum_of_squares_body(x, size);                                                           \
  }                                                                                                \
  PYCOLLECTIVE_CLONES void add_multiple(const T* x, double factor, const T* y, T* z, Index size) { \
    add_multiple_body(x, T(factor), y, z, size);                                                   \
  }                                                                                                \
  PYCOLLECTIVE_CLONES void relu(const T* x, T* y, Index size) { relu_body(x, y, size); }           \
  PYCOLLECTIVE_CLONES void add_relu(const T* x, const T* y, T* z, Index size) {                    \
    add_relu_body(x, y, z, size);                                                                  \
  }                                                                                                \
  PYCOLLECTIVE_CLONES void bias_relu(T* z, const T* bias, Index rows, Index channels, bool relu) { \
    bias_relu_body(z, bias, rows, channels, relu);                                                 \
  }                                                                                                \
  PYCOLLECTIVE_CLONES void relu_gradient(const T* g, const T* y, T* dz, T* bias_gradient,          \
                                         Index rows, Index channels) {                             \
    relu_gradient_body(g, y, dz, bias_gradient, rows, channels);                                   \
  }                                                                                                \
  PYCOLLECTIVE_CLONES void softmax_cross_entropy(const T* logits, const Index* labels, T* losses,  \
                                                 T* gradient, Index rows, Index classes) {         \
    softmax_cross_entropy_body(logits, labels, losses, gradient, rows, classes);                   \
  }

PYCOLLECTIVE_POINTWISE(float)
PYCOLLECTIVE_POINTWISE(double)

}  // namespace pycollective::nn
