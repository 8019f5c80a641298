// Transposes a matrix.
#pragma once

#include <algorithm>

#include "nn/window.h"

namespace pycollective::nn {

// to[j * to_row + i] = from[i * from_row + j] for i < rows and j < columns. In squares, so that
// each cache line is used completely while it is in cache.
inline void transpose(const float* from, Index rows, Index columns, Index from_row, float* to,
                      Index to_row) {
  constexpr Index kSide = 16;
  for (Index first = 0; first < rows; first += kSide) {
    const Index last = std::min(first + kSide, rows);
    for (Index begin = 0; begin < columns; begin += kSide) {
      const Index end = std::min(begin + kSide, columns);
      for (Index j = begin; j < end; ++j) {
        for (Index i = first; i < last; ++i) to[j * to_row + i] = from[i * from_row + j];
      }
    }
  }
}

}  // namespace pycollective::nn
