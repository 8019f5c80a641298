#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "nn/kernels.h"
#include "support/parallel.h"
#include "support/simd.h"

namespace pycollective::nn {
namespace {

struct Sum {
  static constexpr bool kCompares = false;
  template <typename T>
  static constexpr T kStart = 0;
  template <typename T>
  static PYCOLLECTIVE_INLINE T joined(T a, T b) {
    return a + b;
  }
};

struct Product {
  static constexpr bool kCompares = false;
  template <typename T>
  static constexpr T kStart = 1;
  template <typename T>
  static PYCOLLECTIVE_INLINE T joined(T a, T b) {
    return a * b;
  }
};

// The result is NaN if an operand is NaN; the same holds for Minimum.
struct Maximum {
  static constexpr bool kCompares = true;
  template <typename T>
  static constexpr T kStart = -std::numeric_limits<T>::infinity();
  template <typename T>
  static PYCOLLECTIVE_INLINE T joined(T a, T b) {
    return a >= b || a != a ? a : b;
  }
};

struct Minimum {
  static constexpr bool kCompares = true;
  template <typename T>
  static constexpr T kStart = std::numeric_limits<T>::infinity();
  template <typename T>
  static PYCOLLECTIVE_INLINE T joined(T a, T b) {
    return a <= b || a != a ? a : b;
  }
};

// x [outer, count, inner] as tasks. Each slice [count, inner] is divided into pieces of rows, whose
// results are joined afterwards, because long sums have large rounding errors. The division depends
// on the sizes alone, so that the bits of a result do not depend on the number of threads.
struct Tasks {
  static constexpr Index kNumbers = 1 << 13, kRows = 64;  // of a piece, at least
  static constexpr Index kColumns = 1 << 10;              // of a task, at most
  Index count, inner, pieces, blocks, number;

  Tasks(Index outer, Index count_, Index inner_)
      : count(count_),
        inner(inner_),
        pieces(std::max<Index>(count / std::max(kRows, kNumbers / inner), 1)),
        blocks((inner + kColumns - 1) / kColumns),
        number(outer * pieces * blocks) {}
};

// Shorter rows are joined to rows of about this many columns, so that vector loops are long.
constexpr Index kWide = 256;

// y [columns] = the results for each column of x [rows, columns], whose rows are `step` apart.
template <typename Kind, typename T>
PYCOLLECTIVE_INLINE void fold_columns(const T* __restrict x, T* __restrict y, Index rows,
                                      Index columns, Index step) {
  const Index joined = step < kWide ? std::clamp<Index>(rows, 1, kWide / step) : 1;
  const Index wide = joined * columns, tall = rows / joined;
  T total[Tasks::kColumns];
  std::fill(total, total + wide, Kind::template kStart<T>);
  const Index apart = joined * step;
  Index r = 0;
  // Compilers do not vectorize nested comparisons.
  for (; !Kind::kCompares && r + 8 <= tall; r += 8, x += 8 * apart) {
    for (Index c = 0; c < wide; ++c) {
      const T* at = x + c;
      const T first =
          Kind::joined(Kind::joined(at[0], at[apart]), Kind::joined(at[2 * apart], at[3 * apart]));
      const T second = Kind::joined(Kind::joined(at[4 * apart], at[5 * apart]),
                                    Kind::joined(at[6 * apart], at[7 * apart]));
      total[c] = Kind::joined(total[c], Kind::joined(first, second));
    }
  }
  for (; r < tall; ++r, x += apart) {
    for (Index c = 0; c < wide; ++c) total[c] = Kind::joined(total[c], x[c]);
  }
  for (Index c = 0; c < (rows - tall * joined) * columns; ++c) {
    total[c] = Kind::joined(total[c], x[c]);
  }
  // Joins the second half to the first, as in a tree, until one row is left.
  for (Index left = joined; left > 1;) {
    const Index half = (left + 1) / 2;
    for (Index c = 0; c < (left - half) * columns; ++c) {
      total[c] = Kind::joined(total[c], total[half * columns + c]);
    }
    left = half;
  }
  std::copy(total, total + columns, y);
}

// The result for one row, in vectors that stay in registers.
template <typename Kind, typename T>
PYCOLLECTIVE_INLINE T fold_row(const T* __restrict x, Index count) {
  constexpr Index kVectors = 4, kLanes = 64 / sizeof(T);
  T total = Kind::template kStart<T>;
  Index c = 0;
  if (count >= kLanes) {
    T part[kVectors][kLanes];
    for (auto& lanes : part) std::fill(lanes, lanes + kLanes, total);
    for (; c + kVectors * kLanes <= count; c += kVectors * kLanes) {
      for (Index v = 0; v < kVectors; ++v) {
        for (Index l = 0; l < kLanes; ++l) {
          part[v][l] = Kind::joined(part[v][l], x[c + v * kLanes + l]);
        }
      }
    }
    for (; c + kLanes <= count; c += kLanes) {
      for (Index l = 0; l < kLanes; ++l) part[0][l] = Kind::joined(part[0][l], x[c + l]);
    }
    for (Index v = 1; v < kVectors; ++v) {
      for (Index l = 0; l < kLanes; ++l) part[0][l] = Kind::joined(part[0][l], part[v][l]);
    }
    for (Index half = kLanes / 2; half > 0; half /= 2) {
      for (Index l = 0; l < half; ++l) part[0][l] = Kind::joined(part[0][l], part[0][l + half]);
    }
    total = part[0][0];
  }
  for (; c < count; ++c) total = Kind::joined(total, x[c]);
  return total;
}

// y [outer, pieces, inner] = the results of tasks [first, last).
template <typename Kind, typename T>
PYCOLLECTIVE_INLINE void fold_tasks(const Tasks& a, const T* x, T* y, Index first, Index last) {
  for (Index task = first; task < last; ++task) {
    const Index slice = task / a.blocks;  // of all pieces
    const Index column = (task - slice * a.blocks) * Tasks::kColumns;
    const Index o = slice / a.pieces, piece = slice - o * a.pieces;
    const Index top = begin_of_part(a.count, piece, a.pieces);
    const Index rows = begin_of_part(a.count, piece + 1, a.pieces) - top;
    const T* from = x + (o * a.count + top) * a.inner + column;
    T* to = y + slice * a.inner + column;
    if (a.inner == 1) {
      *to = fold_row<Kind>(from, rows);
    } else {
      fold_columns<Kind>(from, to, rows, std::min(a.inner - column, Tasks::kColumns), a.inner);
    }
  }
}

#define PYCOLLECTIVE_FOLD(Kind, T)                                                    \
  PYCOLLECTIVE_CLONES void fold_##Kind(const Tasks& a, const T* x, T* y, Index first, \
                                       Index last) {                                  \
    fold_tasks<Kind>(a, x, y, first, last);                                           \
  }
PYCOLLECTIVE_FOLD(Sum, float)
PYCOLLECTIVE_FOLD(Sum, double)
PYCOLLECTIVE_FOLD(Maximum, float)
PYCOLLECTIVE_FOLD(Maximum, double)
PYCOLLECTIVE_FOLD(Minimum, float)
PYCOLLECTIVE_FOLD(Minimum, double)
PYCOLLECTIVE_FOLD(Product, float)
PYCOLLECTIVE_FOLD(Product, double)

// With fewer numbers, waking other threads takes longer than it saves.
constexpr Index kLeast = 1 << 15;
// A thread keeps memory for this many partial results.
constexpr std::size_t kMostKept = 1 << 18;

template <typename T>
using Fold = void (*)(const Tasks& a, const T* x, T* y, Index first, Index last);

template <typename T>
void reduce_by(Fold<T> fold, const T* x, T* y, Index outer, Index count, Index inner) {
  const Tasks tasks(outer, count, inner);
  thread_local std::vector<T> kept;
  std::vector<T> partial;
  if (tasks.pieces > 1) {
    partial = std::move(kept);
    partial.resize(
        std::max(partial.size(), static_cast<std::size_t>(outer * tasks.pieces * inner)));
  }
  T* to = tasks.pieces > 1 ? partial.data() : y;
  const Index most = std::min<Index>(tasks.number, threads());
  const int parts = static_cast<int>(std::clamp<Index>(outer * count * inner / kLeast, 1, most));
  in_parallel(parts, [&](int part) {
    fold(tasks, x, to, begin_of_part(tasks.number, part, parts),
         begin_of_part(tasks.number, part + 1, parts));
  });
  if (tasks.pieces == 1) return;
  reduce_by(fold, to, y, outer, tasks.pieces, inner);
  if (partial.size() <= kMostKept) kept = std::move(partial);
}

// dx [count, columns] = share where x is the extremum of its column, else 0, for rows that are
// `step` apart. The share is g, divided by the number of such elements of the column.
template <typename T>
PYCOLLECTIVE_INLINE void share_columns(const T* __restrict x, const T* __restrict top,
                                       const T* __restrict g, T* __restrict dx, Index count,
                                       Index columns, Index step) {
  T share[Tasks::kColumns];
  std::fill(share, share + columns, T(0));
  for (Index r = 0; r < count; ++r) {
    for (Index c = 0; c < columns; ++c) share[c] += T(x[r * step + c] == top[c]);
  }
  for (Index c = 0; c < columns; ++c) share[c] = g[c] / share[c];
  for (Index r = 0; r < count; ++r) {
    for (Index c = 0; c < columns; ++c) {
      dx[r * step + c] = T(x[r * step + c] == top[c]) * share[c];
    }
  }
}

// The same for one row.
template <typename T>
PYCOLLECTIVE_INLINE void share_row(const T* __restrict x, T top, T g, T* __restrict dx,
                                   Index count) {
  constexpr Index kLanes = 64 / sizeof(T);
  T hits[kLanes] = {};
  Index c = 0;
  for (; c + kLanes <= count; c += kLanes) {
    for (Index l = 0; l < kLanes; ++l) hits[l] += T(x[c + l] == top);
  }
  for (Index l = 1; l < kLanes; ++l) hits[0] += hits[l];
  for (; c < count; ++c) hits[0] += T(x[c] == top);
  const T share = g / hits[0];
  for (c = 0; c < count; ++c) dx[c] = T(x[c] == top) * share;
}

#define PYCOLLECTIVE_SHARE(T)                                                              \
  PYCOLLECTIVE_CLONES void share(const T* x, const T* top, const T* g, T* dx, Index count, \
                                 Index inner, Index blocks, Index first, Index last) {     \
    for (Index task = first; task < last; ++task) {                                        \
      const Index o = task / blocks, column = (task - o * blocks) * Tasks::kColumns;       \
      const Index at = o * count * inner + column, to = o * inner + column;                \
      if (inner == 1) {                                                                    \
        share_row(x + at, top[to], g[to], dx + at, count);                                 \
      } else {                                                                             \
        const Index columns = std::min(inner - column, Tasks::kColumns);                   \
        share_columns(x + at, top + to, g + to, dx + at, count, columns, inner);           \
      }                                                                                    \
    }                                                                                      \
  }
PYCOLLECTIVE_SHARE(float)
PYCOLLECTIVE_SHARE(double)

template <typename T>
void extremum_gradient_of(const T* x, const T* top, const T* g, T* dx, Index outer, Index count,
                          Index inner) {
  const Index blocks = (inner + Tasks::kColumns - 1) / Tasks::kColumns, tasks = outer * blocks;
  const Index most = std::min<Index>(tasks, threads());
  const int parts = static_cast<int>(std::clamp<Index>(outer * count * inner / kLeast, 1, most));
  in_parallel(parts, [&](int part) {
    share(x, top, g, dx, count, inner, blocks, begin_of_part(tasks, part, parts),
          begin_of_part(tasks, part + 1, parts));
  });
}

}  // namespace

#define PYCOLLECTIVE_REDUCE(T)                                                                  \
  void reduce(Reduction kind, const T* x, T* y, Index outer, Index count, Index inner) {        \
    constexpr Fold<T> kFolds[] = {fold_Sum, fold_Maximum, fold_Minimum, fold_Product};          \
    reduce_by(kFolds[static_cast<int>(kind)], x, y, outer, count, inner);                       \
  }                                                                                             \
  void extremum_gradient(const T* x, const T* top, const T* g, T* dx, Index outer, Index count, \
                         Index inner) {                                                         \
    extremum_gradient_of(x, top, g, dx, outer, count, inner);                                   \
  }
PYCOLLECTIVE_REDUCE(float)
PYCOLLECTIVE_REDUCE(double)

}  // namespace pycollective::nn
