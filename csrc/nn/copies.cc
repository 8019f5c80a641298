// Copies of arrays with any strides, and sums of rows.
#include <algorithm>
#include <cstring>

#include "nn/kernels.h"
#include "support/parallel.h"
#include "support/simd.h"

namespace pycollective::nn {
namespace {

// With fewer bytes, waking other threads takes longer than it saves.
constexpr Index kLeastBytes = 1 << 17;

// Removes axes of length 1, and joins neighbours that one stride covers in both arrays.
void join_axes(Strided& s) {
  int kept = 0;
  for (int i = 0; i < s.axes; ++i) {
    if (s.sizes[i] == 1) continue;
    const int last = kept - 1;
    if (kept && s.from[last] == s.from[i] * s.sizes[i] && s.to[last] == s.to[i] * s.sizes[i]) {
      s.sizes[last] *= s.sizes[i];
      s.from[last] = s.from[i];
      s.to[last] = s.to[i];
      continue;
    }
    s.sizes[kept] = s.sizes[i];
    s.from[kept] = s.from[i];
    s.to[kept++] = s.to[i];
  }
  s.axes = kept;
}

template <typename Unit>
void copy_axis(const char* from, Index from_step, char* to, Index to_step, Index count) {
  constexpr Index kUnit = sizeof(Unit);
  if (from_step == kUnit && to_step == kUnit) {
    std::memcpy(to, from, static_cast<std::size_t>(count * kUnit));
    return;
  }
  Unit unit;
  if (from_step == 0 && to_step == kUnit) {
    std::memcpy(&unit, from, kUnit);
    if (reinterpret_cast<std::uintptr_t>(to) % kUnit == 0) {
      std::fill_n(reinterpret_cast<Unit*>(to), count, unit);
      return;
    }
  }
  for (Index i = 0; i < count; ++i) {
    std::memcpy(&unit, from + i * from_step, kUnit);
    std::memcpy(to + i * to_step, &unit, kUnit);
  }
}

// Copies two axes. The numbers of `from` are adjacent along the first axis, those of `to` along the
// second. Squares are copied, so that each cache line is used completely while it is in cache.
template <typename Unit>
void copy_transposed(const char* from, Index from_step, char* to, Index to_step, Index rows,
                     Index columns) {
  constexpr Index kSide = 64 / sizeof(Unit);
  for (Index first = 0; first < rows; first += kSide) {
    const Index some = std::min(kSide, rows - first);
    for (Index begin = 0; begin < columns; begin += kSide) {
      const Index end = std::min(begin + kSide, columns);
      for (Index r = first; r < first + some; ++r) {
        const char* source = from + r * static_cast<Index>(sizeof(Unit));
        copy_axis<Unit>(source + begin * from_step, from_step,
                        to + r * to_step + begin * static_cast<Index>(sizeof(Unit)), sizeof(Unit),
                        end - begin);
      }
    }
  }
}

PYCOLLECTIVE_INLINE void copy_step(const char* from, char* to) {
  typedef char Step __attribute__((vector_size(64), aligned(1), may_alias));
  *reinterpret_cast<Step*>(to) = *reinterpret_cast<const Step*>(from);
}

// Rows of kStep to kMostSteps * kStep bytes are copied in steps of kStep bytes. A call of memcpy
// for each row would take longer than the row's copy.
constexpr Index kStep = 64, kMostSteps = 16;

PYCOLLECTIVE_CLONES void copy_rows(const char* from, Index from_step, char* to, Index to_step,
                                   Index rows, Index bytes) {
  for (Index r = 0; r < rows; ++r, from += from_step, to += to_step) {
    if (bytes < kStep || bytes > kMostSteps * kStep) {
      std::memcpy(to, from, static_cast<std::size_t>(bytes));
      continue;
    }
    Index at = 0;
    for (; at + kStep <= bytes; at += kStep) copy_step(from + at, to + at);
    // The last step overlaps the step before it.
    if (at < bytes) copy_step(from + bytes - kStep, to + bytes - kStep);
  }
}

template <typename Unit>
void copy_box(const Strided& s, const char* from, char* to, int axis) {
  const int left = s.axes - axis;
  const Index size = s.sizes[axis], a = s.from[axis], b = s.to[axis];
  if (left == 1) {
    copy_axis<Unit>(from, a, to, b, size);
  } else if (left == 2 && a == sizeof(Unit) && s.to[axis + 1] == sizeof(Unit)) {
    copy_transposed<Unit>(from, s.from[axis + 1], to, b, size, s.sizes[axis + 1]);
  } else if (left == 2 && s.from[axis + 1] == sizeof(Unit) && s.to[axis + 1] == sizeof(Unit)) {
    copy_rows(from, a, to, b, size, s.sizes[axis + 1] * static_cast<Index>(sizeof(Unit)));
  } else {
    for (Index i = 0; i < size; ++i) copy_box<Unit>(s, from + i * a, to + i * b, axis + 1);
  }
}

template <typename Unit>
void copy_units(Strided s, const char* from, char* to) {
  join_axes(s);
  if (s.axes == 0) {
    std::memcpy(to, from, sizeof(Unit));
    return;
  }
  Index bytes = sizeof(Unit);
  for (int i = 0; i < s.axes; ++i) bytes *= s.sizes[i];
  const int parts = static_cast<int>(std::clamp<Index>(bytes / kLeastBytes, 1, threads()));
  int axis = 0;
  while (axis < s.axes - 1 && s.sizes[axis] < parts) ++axis;
  in_parallel(parts, [&](int part) {
    const Index first = begin_of_part(s.sizes[axis], part, parts);
    Strided slice = s;
    slice.sizes[axis] = begin_of_part(s.sizes[axis], part + 1, parts) - first;
    copy_box<Unit>(slice, from + first * s.from[axis], to + first * s.to[axis], 0);
  });
}

template <typename T>
PYCOLLECTIVE_INLINE void add_rows_body(const T* __restrict rows, const Index* __restrict index,
                                       T* __restrict y, Index count, Index width, Index first,
                                       Index last) {
  for (Index r = 0; r < count; ++r, rows += width) {
    if (index[r] < first || index[r] >= last) continue;
    T* __restrict to = y + index[r] * width;
    for (Index c = 0; c < width; ++c) to[c] += rows[c];
  }
}

#define PYCOLLECTIVE_ADD_ROWS(T)                                                               \
  PYCOLLECTIVE_CLONES void add_some_rows(const T* rows, const Index* index, T* y, Index count, \
                                         Index width, Index first, Index last) {               \
    add_rows_body(rows, index, y, count, width, first, last);                                  \
  }
PYCOLLECTIVE_ADD_ROWS(float)
PYCOLLECTIVE_ADD_ROWS(double)

// Each thread adds to its own rows of y, so that the order of additions is always the same.
template <typename T>
void add_rows_in_parallel(const T* rows, const Index* index, T* y, Index count, Index width,
                          Index height) {
  const Index bytes = count * width * static_cast<Index>(sizeof(T));
  const int parts = static_cast<int>(std::clamp<Index>(bytes / kLeastBytes, 1, threads()));
  in_parallel(parts, [&](int part) {
    add_some_rows(rows, index, y, count, width, begin_of_part(height, part, parts),
                  begin_of_part(height, part + 1, parts));
  });
}

}  // namespace

bool copy(const Strided& strided, const char* from, char* to, Index item) {
  for (int i = 0; i < strided.axes; ++i) {
    if (strided.sizes[i] == 0) return true;
  }
  switch (item) {
    case 1:
      copy_units<std::uint8_t>(strided, from, to);
      return true;
    case 2:
      copy_units<std::uint16_t>(strided, from, to);
      return true;
    case 4:
      copy_units<std::uint32_t>(strided, from, to);
      return true;
    case 8:
      copy_units<std::uint64_t>(strided, from, to);
      return true;
  }
  return false;
}

void add_rows(const float* rows, const Index* index, float* y, Index count, Index width,
              Index height) {
  add_rows_in_parallel(rows, index, y, count, width, height);
}
void add_rows(const double* rows, const Index* index, double* y, Index count, Index width,
              Index height) {
  add_rows_in_parallel(rows, index, y, count, width, height);
}

}  // namespace pycollective::nn
