// Matrix products of the sizes inside one layer. A BLAS would need a call for each product, and its
// waiting threads would occupy the cores.
#pragma once

#include "nn/scratch.h"
#include "nn/window.h"

namespace pycollective::nn {

// A matrix m(i, j) = data[i * row + j * step]; or a factor that is packed already.
struct Factor {
  const float* data;
  Index row, step;
  bool packed = false;
};

// The inner loops for this processor.
struct Products {
  // Computes panels [first, last) of columns of c [rows, columns] (+)= a b, where depth > 0.
  void (*multiply)(const Factor& a, const Factor& b, float* c, Index rows, Index columns,
                   Index depth, bool add, Index first, Index last, Scratch& scratch);
  Index (*count_panels)(Index columns);
  // Packs panels [first, last) of a right factor that several products use. All panels together
  // have packed_size(columns, depth) numbers.
  void (*pack)(const Factor& b, Index columns, Index depth, Index first, Index last, float* to);
};

inline Index packed_size(Index columns, Index depth) { return round_up(columns, kWidest) * depth; }

Products pick_products();

}  // namespace pycollective::nn
