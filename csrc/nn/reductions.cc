#include <algorithm>
#include <limits>
#include <vector>

#include "nn/kernels.h"
#include "nn/lanes.h"
#include "nn/parallel.h"
#include "support/simd.h"

namespace pycollective::nn {
namespace {

struct Sum {
  template <typename T>
  static constexpr T kStart = 0;
  template <typename T>
  static PYCOLLECTIVE_INLINE T joined(T a, T b) {
    return a + b;
  }
};

struct Product {
  template <typename T>
  static constexpr T kStart = 1;
  template <typename T>
  static PYCOLLECTIVE_INLINE T joined(T a, T b) {
    return a * b;
  }
};

// NaN is greater and less than every number.
struct Maximum {
  template <typename T>
  static constexpr T kStart = -std::numeric_limits<T>::infinity();
  template <typename T>
  static PYCOLLECTIVE_INLINE T joined(T a, T b) {
    return a >= b || a != a ? a : b;
  }
};

struct Minimum {
  template <typename T>
  static constexpr T kStart = std::numeric_limits<T>::infinity();
  template <typename T>
  static PYCOLLECTIVE_INLINE T joined(T a, T b) {
    return a <= b || a != a ? a : b;
  }
};

// Columns that are processed at once. Rows of fewer columns are joined to rows of about as many.
constexpr Index kWide = 256;
// Partial results of this many rows are joined, because long sums have large rounding errors.
constexpr Index kBlock = 64;

// y [columns] = the results for each column of x [rows, columns].
template <typename Kind, typename T>
PYCOLLECTIVE_INLINE void fold_columns(const T* __restrict x, T* __restrict y, Index rows,
                                      Index columns) {
  const Index joined = columns < kWide ? std::clamp<Index>(rows, 1, kWide / columns) : 1;
  const Index wide = joined * columns, tall = rows / joined;
  for (Index first = 0; first < wide; first += kWide) {
    const Index some = std::min(kWide, wide - first);
    T total[kWide], part[kWide];
    std::fill(total, total + some, Kind::template kStart<T>);
    for (Index r = 0; r < tall;) {
      const Index last = std::min(r + kBlock, tall);
      std::fill(part, part + some, Kind::template kStart<T>);
      for (; r < last; ++r) {
        const T* row = x + r * wide + first;
        for (Index c = 0; c < some; ++c) part[c] = Kind::joined(part[c], row[c]);
      }
      for (Index c = 0; c < some; ++c) total[c] = Kind::joined(total[c], part[c]);
    }
    if (joined == 1) {
      std::copy(total, total + some, y + first);
      continue;
    }
    const T* rest = x + tall * wide;
    for (Index c = 0; c < (rows - tall * joined) * columns; ++c) {
      total[c] = Kind::joined(total[c], rest[c]);
    }
    // In halves, as in a tree.
    for (Index left = joined; left > 1;) {
      const Index half = (left + 1) / 2;
      for (Index c = 0; c < (left - half) * columns; ++c) {
        total[c] = Kind::joined(total[c], total[half * columns + c]);
      }
      left = half;
    }
    std::copy(total, total + columns, y);
  }
}

// y [rows] = the results for each row of x [rows, columns], in vectors that stay in registers.
template <typename Kind, typename T>
PYCOLLECTIVE_INLINE void fold_rows(const T* __restrict x, T* __restrict y, Index rows,
                                   Index columns) {
  constexpr Index kVectors = 4, kLanes = Lanes<T>::kCount;
  for (Index r = 0; r < rows; ++r, x += columns) {
    T total = Kind::template kStart<T>;
    for (Index c = 0; c < columns;) {
      const Index last = std::min(c + kBlock * kVectors * kLanes, columns);
      T part[kVectors][kLanes];
      for (auto& lanes : part) std::fill(lanes, lanes + kLanes, Kind::template kStart<T>);
      for (; c + kVectors * kLanes <= last; c += kVectors * kLanes) {
        for (Index v = 0; v < kVectors; ++v) {
          for (Index l = 0; l < kLanes; ++l) {
            part[v][l] = Kind::joined(part[v][l], x[c + v * kLanes + l]);
          }
        }
      }
      for (; c + kLanes <= last; c += kLanes) {
        for (Index l = 0; l < kLanes; ++l) part[0][l] = Kind::joined(part[0][l], x[c + l]);
      }
      for (Index v = 1; v < kVectors; ++v) {
        for (Index l = 0; l < kLanes; ++l) part[0][l] = Kind::joined(part[0][l], part[v][l]);
      }
      for (Index half = kLanes / 2; half > 0; half /= 2) {
        for (Index l = 0; l < half; ++l) part[0][l] = Kind::joined(part[0][l], part[0][l + half]);
      }
      for (; c < last; ++c) part[0][0] = Kind::joined(part[0][0], x[c]);
      total = Kind::joined(total, part[0][0]);
    }
    y[r] = total;
  }
}

// y [outer, inner] = the results for x [outer, count, inner].
#define PYCOLLECTIVE_FOLD(Kind, T)                                                                \
  PYCOLLECTIVE_CLONES void fold_##Kind(const T* x, T* y, Index outer, Index count, Index inner) { \
    if (inner == 1) return fold_rows<Kind>(x, y, outer, count);                                   \
    for (Index o = 0; o < outer; ++o) {                                                           \
      fold_columns<Kind>(x + o * count * inner, y + o * inner, count, inner);                     \
    }                                                                                             \
  }
PYCOLLECTIVE_FOLD(Sum, float)
PYCOLLECTIVE_FOLD(Sum, double)
PYCOLLECTIVE_FOLD(Maximum, float)
PYCOLLECTIVE_FOLD(Maximum, double)
PYCOLLECTIVE_FOLD(Minimum, float)
PYCOLLECTIVE_FOLD(Minimum, double)
PYCOLLECTIVE_FOLD(Product, float)
PYCOLLECTIVE_FOLD(Product, double)

// With fewer numbers, waking other threads does not pay.
constexpr Index kLeast = 1 << 15;
// A thread keeps memory for this many partial results.
constexpr Index kMostKept = 1 << 18;

template <typename T>
using Fold = void (*)(const T* x, T* y, Index outer, Index count, Index inner);

template <typename T>
void reduce_by(Fold<T> fold, const T* x, T* y, Index outer, Index count, Index inner) {
  const Index slice = count * inner;
  const int parts = static_cast<int>(std::clamp<Index>(outer * slice / kLeast, 1, threads()));
  if (outer >= parts || count < parts) {
    in_parallel(parts, [&](int part) {
      const Index first = begin_of_part(outer, part, parts);
      fold(x + first * slice, y + first * inner, begin_of_part(outer, part + 1, parts) - first,
           count, inner);
    });
    return;
  }
  thread_local std::vector<T> kept;
  std::vector<T> fresh;
  std::vector<T>& sums = parts * inner <= kMostKept ? kept : fresh;
  if (sums.size() < static_cast<std::size_t>(parts * inner)) {
    sums.resize(static_cast<std::size_t>(parts * inner));
  }
  T* partial = sums.data();
  for (Index o = 0; o < outer; ++o, x += slice, y += inner) {
    in_parallel(parts, [&](int part) {
      const Index first = begin_of_part(count, part, parts);
      fold(x + first * inner, partial + part * inner, 1,
           begin_of_part(count, part + 1, parts) - first, inner);
    });
    fold(partial, y, 1, parts, inner);
  }
}

}  // namespace

#define PYCOLLECTIVE_REDUCE(T)                                                           \
  void reduce(Reduction kind, const T* x, T* y, Index outer, Index count, Index inner) { \
    constexpr Fold<T> kFolds[] = {fold_Sum, fold_Maximum, fold_Minimum, fold_Product};   \
    reduce_by(kFolds[static_cast<int>(kind)], x, y, outer, count, inner);                \
  }
PYCOLLECTIVE_REDUCE(float)
PYCOLLECTIVE_REDUCE(double)

}  // namespace pycollective::nn
