// Channel statistics and normalization with few passes over memory. Arrays are [rows, channels].
#include <algorithm>
#include <cmath>
#include <vector>

#include "nn/kernels.h"
#include "support/parallel.h"
#include "support/simd.h"

namespace pycollective::nn {
namespace {

// If there are few channels, several rows are processed at once, so that vector loops are long.
constexpr Index kWide = 256;
// A block that is read twice stays in a cache, and short sums have small errors.
constexpr Index kBlockNumbers = 1 << 12, kLeastRows = 32, kMostRows = 128;
Index rows_of_block(Index wide) { return std::clamp(kBlockNumbers / wide, kLeastRows, kMostRows); }

Index fold_of(Index rows, Index channels) {
  Index fold = 1;
  while (2 * fold * channels <= kWide && rows % (2 * fold) == 0) fold *= 2;
  return fold;
}

template <typename T>
std::vector<T> repeated(const T* values, Index channels, Index fold) {
  std::vector<T> result;
  result.reserve(static_cast<std::size_t>(channels * fold));
  for (Index k = 0; k < fold && values; ++k) {
    result.insert(result.end(), values, values + channels);
  }
  return result;
}

// sums += columns of x; rests += columns of x - mean; squares += columns of (x - mean)².
template <typename T>
PYCOLLECTIVE_INLINE void add_columns_body(const T* __restrict x, Index rows, Index wide,
                                          T* __restrict sums) {
  for (Index r = 0; r < rows; ++r, x += wide) {
    for (Index c = 0; c < wide; ++c) sums[c] += x[c];
  }
}
template <typename T>
PYCOLLECTIVE_INLINE void add_squares_body(const T* __restrict x, const T* __restrict mean,
                                          Index rows, Index wide, T* __restrict rests,
                                          T* __restrict squares) {
  for (Index r = 0; r < rows; ++r, x += wide) {
    for (Index c = 0; c < wide; ++c) {
      const T rest = x[c] - mean[c];
      rests[c] += rest;
      squares[c] += rest * rest;
    }
  }
}
// Merges mean and squares of a block with those of the `before` rows before it (Chan, Golub and
// LeVeque, 1979). The mean may be rounded: `rests` has the sums of differences from it, which
// correct both (the same authors, 1983).
template <typename T>
PYCOLLECTIVE_INLINE void join_block_body(const T* __restrict mean, const T* __restrict rests,
                                         const T* __restrict squares, Index wide, double rows,
                                         double before, double* __restrict total_mean,
                                         double* __restrict total_squares) {
  const double inverse = 1 / rows, share = rows / (before + rows), weight = before * share;
  for (Index c = 0; c < wide; ++c) {
    const double rest = static_cast<double>(rests[c]) * inverse;
    const double distance = static_cast<double>(mean[c]) + rest - total_mean[c];
    const double around_mean = static_cast<double>(squares[c]) - rest * rest * rows;
    total_squares[c] += (around_mean > 0 ? around_mean : 0) + distance * distance * weight;
    total_mean[c] += distance * share;
  }
}
// Returns g where relu((x - mean) factor + bias) passes it, else 0. Without relu, returns g.
template <bool kRelu, typename T>
PYCOLLECTIVE_INLINE T let_through(T g, T x, T mean, T factor, T bias) {
  return !kRelu || (x - mean) * factor + bias > 0 ? g : T{0};
}
template <bool kRelu, typename T>
PYCOLLECTIVE_INLINE void add_products_loop(const T* __restrict g, const T* __restrict x,
                                           const T* __restrict mean, const T* __restrict factor,
                                           const T* __restrict bias, Index rows, Index wide,
                                           T* __restrict sums, T* __restrict products) {
  for (Index r = 0; r < rows; ++r, x += wide, g += wide) {
    for (Index c = 0; c < wide; ++c) {
      const T part = let_through<kRelu>(g[c], x[c], mean[c], factor[c], bias[c]);
      sums[c] += part;
      products[c] += part * (x[c] - mean[c]);
    }
  }
}
template <bool kRelu, typename T>
PYCOLLECTIVE_INLINE void scale_loop(const T* __restrict x, const T* __restrict mean,
                                    const T* __restrict factor, const T* __restrict shift,
                                    T* __restrict y, Index rows, Index wide) {
  for (Index r = 0; r < rows; ++r, x += wide, y += wide) {
    for (Index c = 0; c < wide; ++c) {
      const T value = (x[c] - mean[c]) * factor[c] + shift[c];
      y[c] = kRelu && value < 0 ? T{0} : value;
    }
  }
}
template <bool kRelu, typename T>
PYCOLLECTIVE_INLINE void combine_loop(const T* __restrict g, const T* __restrict x,
                                      const T* __restrict mean, const T* __restrict by_g,
                                      const T* __restrict by_x, const T* __restrict shift,
                                      const T* __restrict factor, const T* __restrict bias,
                                      T* __restrict dx, Index rows, Index wide) {
  for (Index r = 0; r < rows; ++r, g += wide, x += wide, dx += wide) {
    for (Index c = 0; c < wide; ++c) {
      const T part = let_through<kRelu>(g[c], x[c], mean[c], factor[c], bias[c]);
      dx[c] = part * by_g[c] + (x[c] - mean[c]) * by_x[c] + shift[c];
    }
  }
}

}  // namespace

// A named namespace: clones need functions with external linkage.
namespace columns {

#define PYCOLLECTIVE_NORMALIZE(T)                                                                  \
  PYCOLLECTIVE_CLONES void add_columns(const T* x, Index rows, Index wide, T* sums) {              \
    add_columns_body(x, rows, wide, sums);                                                         \
  }                                                                                                \
  PYCOLLECTIVE_CLONES void add_squares(const T* x, const T* mean, Index rows, Index wide,          \
                                       T* rests, T* squares) {                                     \
    add_squares_body(x, mean, rows, wide, rests, squares);                                         \
  }                                                                                                \
  PYCOLLECTIVE_CLONES void join_block(const T* mean, const T* rests, const T* squares, Index wide, \
                                      double rows, double before, double* total_mean,              \
                                      double* total_squares) {                                     \
    join_block_body(mean, rests, squares, wide, rows, before, total_mean, total_squares);          \
  }                                                                                                \
  PYCOLLECTIVE_CLONES void add_products(const T* g, const T* x, const T* mean, const T* factor,    \
                                        const T* bias, Index rows, Index wide, T* sums,            \
                                        T* products) {                                             \
    if (bias) {                                                                                    \
      add_products_loop<true>(g, x, mean, factor, bias, rows, wide, sums, products);               \
    } else {                                                                                       \
      add_products_loop<false>(g, x, mean, mean, mean, rows, wide, sums, products);                \
    }                                                                                              \
  }                                                                                                \
  PYCOLLECTIVE_CLONES void scale(const T* x, const T* mean, const T* factor, const T* shift, T* y, \
                                 Index rows, Index wide, bool relu) {                              \
    if (relu) {                                                                                    \
      scale_loop<true>(x, mean, factor, shift, y, rows, wide);                                     \
    } else {                                                                                       \
      scale_loop<false>(x, mean, factor, shift, y, rows, wide);                                    \
    }                                                                                              \
  }                                                                                                \
  PYCOLLECTIVE_CLONES void combine(const T* g, const T* x, const T* mean, const T* by_g,           \
                                   const T* by_x, const T* shift, const T* factor, const T* bias,  \
                                   T* dx, Index rows, Index wide) {                                \
    if (bias) {                                                                                    \
      combine_loop<true>(g, x, mean, by_g, by_x, shift, factor, bias, dx, rows, wide);             \
    } else {                                                                                       \
      combine_loop<false>(g, x, mean, by_g, by_x, shift, mean, mean, dx, rows, wide);              \
    }                                                                                              \
  }

PYCOLLECTIVE_NORMALIZE(float)
PYCOLLECTIVE_NORMALIZE(double)

}  // namespace columns

namespace {

// For each column: means of `rows` rows, and sums of squared differences from the means.
struct Moments {
  double rows = 0;
  std::vector<double> mean, squares;

  explicit Moments(Index wide)
      : mean(static_cast<std::size_t>(wide)), squares(static_cast<std::size_t>(wide)) {}

  template <typename T>
  void join(const T* other_mean, const T* rests, const T* other_squares, double other_rows) {
    columns::join_block(other_mean, rests, other_squares, static_cast<Index>(mean.size()),
                        other_rows, rows, mean.data(), squares.data());
    rows += other_rows;
  }
};

template <typename T>
void part_moments(const T* x, Index rows, Index wide, Moments& total) {
  const Index step = rows_of_block(wide);
  const auto size = static_cast<std::size_t>(wide);
  std::vector<T> mean(size), rests(size), squares(size);
  for (Index first = 0; first < rows; first += step) {
    const Index some = std::min(step, rows - first);
    std::fill(mean.begin(), mean.end(), T{0});
    std::fill(rests.begin(), rests.end(), T{0});
    std::fill(squares.begin(), squares.end(), T{0});
    columns::add_columns(x + first * wide, some, wide, mean.data());
    for (T& m : mean) m /= static_cast<T>(some);
    columns::add_squares(x + first * wide, mean.data(), some, wide, rests.data(), squares.data());
    total.join(mean.data(), rests.data(), squares.data(), static_cast<double>(some));
  }
}

template <typename T>
void batch_moments_body(const T* x, T* mean, T* variance, Index rows, Index channels) {
  const Index fold = fold_of(rows, channels);
  const Index tall = rows / fold, wide = channels * fold;
  const int parts = static_cast<int>(std::clamp<Index>(tall, 1, threads()));
  std::vector<Moments> moments(static_cast<std::size_t>(parts), Moments(wide));
  in_parallel(parts, [&](int part) {
    const Index first = begin_of_part(tall, part, parts);
    part_moments(x + first * wide, begin_of_part(tall, part + 1, parts) - first, wide,
                 moments[static_cast<std::size_t>(part)]);
  });
  Moments total(channels);
  const std::vector<double> no_rests(static_cast<std::size_t>(channels));
  for (const Moments& some : moments) {
    for (Index k = 0; k < fold && some.rows > 0; ++k) {
      total.join(some.mean.data() + k * channels, no_rests.data(),
                 some.squares.data() + k * channels, some.rows);
    }
  }
  for (std::size_t c = 0; c < static_cast<std::size_t>(channels); ++c) {
    mean[c] = static_cast<T>(total.mean[c]);
    variance[c] = static_cast<T>(total.squares[c] / std::max(total.rows, 1.0));
  }
}

template <typename T>
void batch_sums(const T* g, const T* x, const T* mean, const T* factor, const T* bias, T* sums,
                T* products, Index rows, Index channels) {
  const Index fold = fold_of(rows, channels);
  const Index tall = rows / fold, wide = channels * fold;
  const auto size = static_cast<std::size_t>(wide);
  const std::vector<T> means = repeated(mean, channels, fold);
  const std::vector<T> factors = repeated(factor, channels, fold);
  const std::vector<T> biases = repeated(bias, channels, fold);
  const int parts = static_cast<int>(std::clamp<Index>(tall, 1, threads()));
  std::vector<std::vector<double>> totals(static_cast<std::size_t>(parts),
                                          std::vector<double>(2 * size));
  in_parallel(parts, [&](int part) {
    const Index first = begin_of_part(tall, part, parts);
    const Index last = begin_of_part(tall, part + 1, parts);
    const Index step = rows_of_block(wide);
    std::vector<double>& total = totals[static_cast<std::size_t>(part)];
    std::vector<T> block(2 * size);
    for (Index r = first; r < last; r += step) {
      std::fill(block.begin(), block.end(), T{0});
      columns::add_products(g + r * wide, x + r * wide, means.data(), factors.data(),
                            bias ? biases.data() : nullptr, std::min(step, last - r), wide,
                            block.data(), block.data() + size);
      for (std::size_t c = 0; c < 2 * size; ++c) total[c] += block[c];
    }
  });
  for (std::size_t c = 0; c < static_cast<std::size_t>(channels); ++c) {
    double sum = 0, product = 0;
    for (const std::vector<double>& total : totals) {
      for (std::size_t at = c; at < size; at += static_cast<std::size_t>(channels)) {
        sum += total[at];
        product += total[size + at];
      }
    }
    sums[c] = static_cast<T>(sum);
    products[c] = static_cast<T>(product);
  }
}

// Calls body(offset, rows, width) for parts of [rows, channels], in which `fold` rows form one.
template <typename Body>
void by_rows(Index rows, Index channels, Index fold, const Body& body) {
  const Index tall = rows / fold, wide = channels * fold;
  const int parts = static_cast<int>(std::clamp<Index>(tall, 1, threads()));
  in_parallel(parts, [&](int part) {
    const Index first = begin_of_part(tall, part, parts);
    body(first * wide, begin_of_part(tall, part + 1, parts) - first, wide);
  });
}

// For each channel: 1 / sqrt(variance + epsilon), its product with the factor, and the shift.
template <typename T>
struct Slopes {
  std::vector<T> inverse, slope, shift;

  explicit Slopes(const Batch<T>& b) {
    for (Index c = 0; c < b.channels; ++c) {
      inverse.push_back(T{1} / std::sqrt(b.variance[c] + b.epsilon));
      slope.push_back(b.factor ? inverse.back() * b.factor[c] : inverse.back());
      shift.push_back(b.shift ? b.shift[c] : T{0});
    }
  }
};

template <typename T>
void normalize_batch_body(const Batch<T>& b, T* y) {
  const Slopes<T> by_channel(b);
  const Index fold = fold_of(b.rows, b.channels);
  const std::vector<T> means = repeated(b.mean, b.channels, fold);
  const std::vector<T> slopes = repeated(by_channel.slope.data(), b.channels, fold);
  const std::vector<T> shifts = repeated(by_channel.shift.data(), b.channels, fold);
  by_rows(b.rows, b.channels, fold, [&](Index at, Index some, Index wide) {
    columns::scale(b.x + at, means.data(), slopes.data(), shifts.data(), y + at, some, wide,
                   b.relu);
  });
}

template <typename T>
void normalize_batch_gradient_body(const Batch<T>& b, bool constant, const T* g, T* dx,
                                   T* by_factor, T* by_shift) {
  const Slopes<T> by_channel(b);
  const auto size = static_cast<std::size_t>(b.channels);
  std::vector<T> products(size), by_x(size), offset(size);
  batch_sums(g, b.x, b.mean, by_channel.slope.data(), b.relu ? by_channel.shift.data() : nullptr,
             by_shift, products.data(), b.rows, b.channels);
  const T count = static_cast<T>(std::max<Index>(b.rows, 1));
  for (std::size_t c = 0; c < size; ++c) {
    by_factor[c] = products[c] * by_channel.inverse[c];
    if (constant) continue;
    by_x[c] = -by_channel.slope[c] * products[c] *
              (by_channel.inverse[c] * by_channel.inverse[c] / count);
    offset[c] = -by_channel.slope[c] * by_shift[c] / count;
  }
  if (!dx) return;
  const Index fold = fold_of(b.rows, b.channels);
  const std::vector<T> means = repeated(b.mean, b.channels, fold);
  const std::vector<T> slopes = repeated(by_channel.slope.data(), b.channels, fold);
  const std::vector<T> shifts = repeated(by_channel.shift.data(), b.channels, fold);
  const std::vector<T> by_xs = repeated(by_x.data(), b.channels, fold);
  const std::vector<T> offsets = repeated(offset.data(), b.channels, fold);
  by_rows(b.rows, b.channels, fold, [&](Index at, Index some, Index wide) {
    columns::combine(g + at, b.x + at, means.data(), slopes.data(), by_xs.data(), offsets.data(),
                     slopes.data(), b.relu ? shifts.data() : nullptr, dx + at, some, wide);
  });
}

}  // namespace

#define PYCOLLECTIVE_BATCH(T)                                                            \
  void batch_moments(const T* x, T* mean, T* variance, Index rows, Index channels) {     \
    batch_moments_body(x, mean, variance, rows, channels);                               \
  }                                                                                      \
  void move_average(const T* average, const T* value, T* moved, Index size, T weight) {  \
    for (Index k = 0; k < size; ++k) {                                                   \
      moved[k] = average[k] + (value[k] - average[k]) * weight;                          \
    }                                                                                    \
  }                                                                                      \
  void normalize_batch(const Batch<T>& batch, T* y) { normalize_batch_body(batch, y); }  \
  void normalize_batch_gradient(const Batch<T>& batch, bool constant, const T* g, T* dx, \
                                T* by_factor, T* by_shift) {                             \
    normalize_batch_gradient_body(batch, constant, g, dx, by_factor, by_shift);          \
  }

PYCOLLECTIVE_BATCH(float)
PYCOLLECTIVE_BATCH(double)

}  // namespace pycollective::nn
