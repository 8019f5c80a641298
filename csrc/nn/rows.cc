// Operations on rows: softmax, its logarithm, losses, layer normalization.
#include <algorithm>
#include <cmath>

#include "nn/elementary.h"
#include "nn/kernels.h"
#include "support/simd.h"

namespace pycollective::nn {
namespace {

// Sums are accumulated in lanes, in a fixed order, because the compiler may not reorder one sum.
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

// The sum of term(c) for all classes c, in blocks: sums of more numbers have larger errors.
template <typename T, typename Term>
PYCOLLECTIVE_INLINE double long_sum_of(Index classes, const Term& term) {
  constexpr Index kBlock = 1 << 12;
  double total = 0;
  for (Index first = 0; first < classes; first += kBlock) {
    total += static_cast<double>(
        sum_of<T>(std::min(kBlock, classes - first), [&](Index c) { return term(first + c); }));
  }
  return total;
}

// The maximum of term(c); NaN counts as less than every number, unless it is the first.
template <typename T, typename Term>
PYCOLLECTIVE_INLINE T maximum_of(Index classes, const Term& term) {
  T top[kLanes];
  for (Index l = 0; l < kLanes; ++l) top[l] = term(0);
  Index c = 0;
  for (; c + kLanes <= classes; c += kLanes) {
    for (Index l = 0; l < kLanes; ++l) {
      const T value = term(c + l);
      top[l] = value > top[l] ? value : top[l];
    }
  }
  for (; c < classes; ++c) top[0] = term(c) > top[0] ? term(c) : top[0];
  for (Index l = 1; l < kLanes; ++l) top[0] = top[l] > top[0] ? top[l] : top[0];
  return top[0];
}

template <typename T>
PYCOLLECTIVE_INLINE T maximum_of(const T* __restrict x, Index classes) {
  return maximum_of<T>(classes, [&](Index c) { return x[c]; });
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

// A loss is a struct with value(t, p, c) and slope(t, p, c), its derivative by p. t is the target,
// p the prediction, and c the loss's parameter. A loss of a whole row has row(t, p, slopes, size,
// c) instead. It returns the loss, and writes the derivatives unless `slopes` is null. To add a
// loss, write it here, and name it once at the end. kMean: the loss of a row is a mean, not a sum.
// kLabels: c is 1 if all targets are 0 or 1, else 0.
struct OfMeans {
  static constexpr bool kMean = true, kLabels = false;
};

template <typename T>
struct SquaredError : OfMeans {
  static PYCOLLECTIVE_INLINE T value(T t, T p, T) { return (p - t) * (p - t); }
  static PYCOLLECTIVE_INLINE T slope(T t, T p, T) { return T(2) * (p - t); }
};

template <typename T>
struct AbsoluteError : OfMeans {
  static PYCOLLECTIVE_INLINE T value(T t, T p, T) { return std::abs(p - t); }
  static PYCOLLECTIVE_INLINE T slope(T t, T p, T) { return p > t ? T(1) : p < t ? T(-1) : p - t; }
};

// c is the lower limit of the absolute value of a target.
template <typename T>
struct PercentageError : OfMeans {
  static PYCOLLECTIVE_INLINE T share(T t, T c) {
    const T size = std::abs(t);
    return T(100) / (size < c ? c : size);
  }
  static PYCOLLECTIVE_INLINE T value(T t, T p, T c) { return std::abs(t - p) * share(t, c); }
  static PYCOLLECTIVE_INLINE T slope(T t, T p, T c) {
    return AbsoluteError<T>::slope(t, p, c) * share(t, c);
  }
};

// c is the lower limit of targets and predictions.
template <typename T>
struct LogarithmicError : OfMeans {
  static PYCOLLECTIVE_INLINE T distance(T t, T p, T c) {
    return log1p_of(p < c ? c : p) - log1p_of(t < c ? c : t);
  }
  static PYCOLLECTIVE_INLINE T value(T t, T p, T c) {
    const T d = distance(t, p, c);
    return d * d;
  }
  static PYCOLLECTIVE_INLINE T slope(T t, T p, T c) {
    return p < c ? T(0) : T(2) * distance(t, p, c) / (T(1) + p);
  }
};

// c is the largest slope.
template <typename T>
struct Huber : OfMeans {
  static PYCOLLECTIVE_INLINE T slope(T t, T p, T c) {
    const T d = p - t;
    return d < -c ? -c : d > c ? c : d;
  }
  static PYCOLLECTIVE_INLINE T value(T t, T p, T c) {
    const T s = slope(t, p, c);
    return s * ((p - t) - T(0.5) * s);
  }
};

template <typename T>
struct LogCosh : OfMeans {
  static PYCOLLECTIVE_INLINE T value(T t, T p, T) {
    const T size = magnitude_of(p - t);
    return size + log1p_of_fraction(exp_of(T(-2) * size)) - T(0.69314718055994530942);
  }
  static PYCOLLECTIVE_INLINE T slope(T t, T p, T) { return tanh_of(p - t); }
};

// c is the lower limit of probabilities.
template <typename T>
struct Divergence {
  static constexpr bool kMean = false, kLabels = false;
  static PYCOLLECTIVE_INLINE T bounded(T x, T c) { return x < c ? c : x > 1 ? T(1) : x; }
  static PYCOLLECTIVE_INLINE T value(T t, T p, T c) {
    return bounded(t, c) * log_of(bounded(t, c) / bounded(p, c));
  }
  static PYCOLLECTIVE_INLINE T slope(T t, T p, T c) {
    const T s = -bounded(t, c) / p;
    return p < c || p > 1 ? T(0) : s;
  }
};

// c is added to the prediction.
template <typename T>
struct Poisson : OfMeans {
  static PYCOLLECTIVE_INLINE T value(T t, T p, T c) { return p - t * log_of(p + c); }
  static PYCOLLECTIVE_INLINE T slope(T t, T p, T c) { return T(1) - t / (p + c); }
};

template <typename T>
struct Hinge : OfMeans {
  static constexpr bool kLabels = true;
  static PYCOLLECTIVE_INLINE T label(T t, T c) { return t * (T(1) + c) - c; }
  static PYCOLLECTIVE_INLINE T value(T t, T p, T c) {
    const T below = T(1) - label(t, c) * p;
    return below < 0 ? T(0) : below;
  }
  static PYCOLLECTIVE_INLINE T slope(T t, T p, T c) {
    return T(1) - label(t, c) * p < 0 ? T(0) : -label(t, c);
  }
};

template <typename T>
struct SquaredHinge : Hinge<T> {
  static PYCOLLECTIVE_INLINE T value(T t, T p, T c) {
    const T below = Hinge<T>::value(t, p, c);
    return below * below;
  }
  static PYCOLLECTIVE_INLINE T slope(T t, T p, T c) {
    return T(-2) * Hinge<T>::value(t, p, c) * Hinge<T>::label(t, c);
  }
};

// The cross-entropy of a probability t and a logit p.
template <typename T>
struct BinaryCrossentropy : OfMeans {
  static PYCOLLECTIVE_INLINE T value(T t, T p, T) {
    return (p > 0 ? p : T(0)) + log1p_of_fraction(exp_of(-magnitude_of(p))) - p * t;
  }
  static PYCOLLECTIVE_INLINE T slope(T t, T p, T) { return sigmoid_of(p) - t; }
};

struct OfRows {
  static constexpr bool kMean = false, kLabels = false;
};

// The cross-entropy of probabilities t and logits p.
template <typename T>
struct SoftmaxCrossentropy : OfRows {
  static PYCOLLECTIVE_INLINE T row(const T* __restrict t, const T* __restrict p,
                                   T* __restrict slopes, Index size, T) {
    const T most = maximum_of(p, size);
    const double sum = long_sum_of<T>(size, [&](Index c) {
      const T e = exp_of(p[c] - most);
      if (slopes) slopes[c] = e;
      return e;
    });
    const double total = long_sum_of<T>(size, [&](Index c) { return t[c]; });
    const double along = long_sum_of<T>(size, [&](Index c) { return t[c] * (p[c] - most); });
    const T scale = static_cast<T>(total / sum);
    for (Index c = 0; slopes && c < size; ++c) slopes[c] = slopes[c] * scale - t[c];
    return static_cast<T>(total * std::log(sum) - along);
  }
};

// The prediction of the right class, for which t is 1, must exceed all others by 1. The largest of
// the others share their derivative.
template <typename T>
struct CategoricalHinge : OfRows {
  static PYCOLLECTIVE_INLINE T row(const T* __restrict t, const T* __restrict p,
                                   T* __restrict slopes, Index size, T) {
    const auto of_other = [&](Index c) { return (T(1) - t[c]) * p[c]; };
    const T right = static_cast<T>(long_sum_of<T>(size, [&](Index c) { return t[c] * p[c]; }));
    const T other = maximum_of<T>(size, of_other);
    const T below = other - right + T(1);
    if (slopes) {
      const double hits = long_sum_of<T>(size, [&](Index c) { return T(of_other(c) == other); });
      const T g = below >= 0 ? T(1) : T(0), share = g / static_cast<T>(hits);
      for (Index c = 0; c < size; ++c) {
        slopes[c] = T(of_other(c) == other) * share * (T(1) - t[c]) - g * t[c];
      }
    }
    return below < 0 ? T(0) : below;
  }
};

// The negative cosine of the angle between t and p. c is the lower limit of their squared lengths.
template <typename T>
struct CosineSimilarity : OfRows {
  static PYCOLLECTIVE_INLINE double inverse(double square, T c) {
    return 1 / std::sqrt(square < static_cast<double>(c) ? static_cast<double>(c) : square);
  }
  static PYCOLLECTIVE_INLINE T row(const T* __restrict t, const T* __restrict p,
                                   T* __restrict slopes, Index size, T c) {
    const double square = long_sum_of<T>(size, [&](Index i) { return p[i] * p[i]; });
    const double along = long_sum_of<T>(size, [&](Index i) { return t[i] * p[i]; });
    const double of_p = inverse(square, c);
    const double of_both =
        of_p * inverse(long_sum_of<T>(size, [&](Index i) { return t[i] * t[i]; }), c);
    const T by_t = static_cast<T>(-of_both);
    const T by_p =
        square < static_cast<double>(c) ? T(0) : static_cast<T>(along * of_both * of_p * of_p);
    for (Index i = 0; slopes && i < size; ++i) slopes[i] = by_t * t[i] + by_p * p[i];
    return static_cast<T>(-along * of_both);
  }
};

template <typename Kind, typename T>
PYCOLLECTIVE_INLINE void losses_body(const T* __restrict t, const T* __restrict p,
                                     T* __restrict losses, T* __restrict slopes, Index rows,
                                     Index size, T c) {
  const T share = T(1) / static_cast<T>(Kind::kMean ? size : 1);
  for (Index r = 0; r < rows; ++r, t += size, p += size) {
    if constexpr (requires { Kind::row(t, p, slopes, size, c); }) {
      losses[r] = Kind::row(t, p, slopes, size, c);
    } else {
      const double total =
          long_sum_of<T>(size, [&](Index i) { return Kind::value(t[i], p[i], c); });
      losses[r] = static_cast<T>(total * static_cast<double>(share));
      for (Index i = 0; slopes && i < size; ++i) slopes[i] = share * Kind::slope(t[i], p[i], c);
    }
    if (slopes) slopes += size;
  }
}

}  // namespace

namespace losses {

#define PYCOLLECTIVE_LOSS_OF(Kind, T)                                                   \
  PYCOLLECTIVE_CLONES void rows_of_##Kind(const T* t, const T* p, T* losses, T* slopes, \
                                          Index rows, Index size, T c) {                \
    losses_body<Kind<T>>(t, p, losses, slopes, rows, size, c);                          \
  }

// clang-format off: it does not support lists without commas
#define PYCOLLECTIVE_LOSSES(X) \
  X("mean_squared_error", SquaredError) X("mean_absolute_error", AbsoluteError) \
  X("mean_absolute_percentage_error", PercentageError) \
  X("mean_squared_logarithmic_error", LogarithmicError) X("huber", Huber) X("log_cosh", LogCosh) \
  X("kl_divergence", Divergence) X("poisson", Poisson) X("hinge", Hinge) \
  X("squared_hinge", SquaredHinge) X("binary_crossentropy", BinaryCrossentropy) \
  X("softmax_cross_entropy", SoftmaxCrossentropy) X("categorical_hinge", CategoricalHinge) \
  X("cosine_similarity", CosineSimilarity)
// clang-format on

#define X(name, Kind)               \
  PYCOLLECTIVE_LOSS_OF(Kind, float) \
  PYCOLLECTIVE_LOSS_OF(Kind, double)
PYCOLLECTIVE_LOSSES(X)
#undef X

#define X(name, Kind) {name, Kind<T>::kLabels, rows_of_##Kind},
template <typename T>
constexpr Loss<T> kAll[] = {PYCOLLECTIVE_LOSSES(X)};
#undef X

}  // namespace losses

template <typename T>
const Loss<T>* find_loss(std::string_view name) {
  return find(losses::kAll<T>, name);
}

template const Loss<float>* find_loss<float>(std::string_view);
template const Loss<double>* find_loss<double>(std::string_view);

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
