// Convolution of images with one or three channels and 3 x 3 filters, with relu and 2 x 2 pooling
// in one pass. The patches are short, so that copying them would take longer than their products.
// The kernel reads them in place, from an image that is padded first if necessary. The filters of
// each tap lie side by side in vectors.
#include <algorithm>
#include <cstring>

#include "nn/kernels.h"
#include "nn/processor.h"
#include "nn/scratch.h"
#include "support/parallel.h"

namespace pycollective::nn {
namespace {

#define PYCOLLECTIVE_LOOPS "nn/direct.inc"
#include "nn/targets.inc"

using PooledRow = decltype(&base::pooled_row<1>);

PooledRow pick_pooled_row(Index channels) {
#ifdef PYCOLLECTIVE_X86_TARGETS
  switch (vector_bytes()) {
    case 64:
      return channels == 1 ? avx512::pooled_row<1> : avx512::pooled_row<3>;
    case 32:
      return channels == 1 ? avx2::pooled_row<1> : avx2::pooled_row<3>;
  }
#endif
  return channels == 1 ? base::pooled_row<1> : base::pooled_row<3>;
}

thread_local Scratch part_scratch, call_scratch;

}  // namespace

void direct_forward(const ConvolutionForward& a) {
  const Window& w = a.w;
  const Window& pool = *a.pool;
  const Index wide = round_up(a.filters, kWidest);
  call_scratch.reserve((w.patch() + 1) * wide, 1);
  float* weights = call_scratch.take((w.patch() + 1) * wide);  // and the bias after them
  std::fill(weights, weights + (w.patch() + 1) * wide, 0.0f);
  for (Index k = 0; k < w.patch(); ++k) {
    std::copy_n(a.weights + k * a.filters, a.filters, weights + k * wide);
  }
  if (a.bias) std::copy_n(a.bias, a.filters, weights + w.patch() * wide);
  const Index height = std::max(w.height + w.pad_top, 2 * pool.out_h + 2);
  const Index width = std::max(w.width + w.pad_left, 2 * pool.out_w + 2);
  const bool padded = height != w.height || width != w.width;
  const Index line = width * w.channels, row_size = pool.out_w * a.filters;
  const auto run = pick_pooled_row(w.channels);
  const Index products = a.images * w.out_h * w.out_w * w.patch() * a.filters;
  in_parts(a.images * pool.out_h, products, [&](Index first, Index last) {
    part_scratch.reserve(padded ? height * line : 0, 1);
    float* copy = part_scratch.take(0);
    if (padded) std::fill(copy, copy + height * line, 0.0f);
    for (Index row = first; row < last; ++row) {
      const float* x = a.x + row / pool.out_h * w.image();
      const bool begins = row == first || row % pool.out_h == 0;
      for (Index y = 0; padded && begins && y < w.height; ++y) {
        std::copy_n(x + y * w.width * w.channels, w.width * w.channels,
                    copy + (y + w.pad_top) * line + w.pad_left * w.channels);
      }
      run((padded ? copy : x) + 2 * (row % pool.out_h) * line, line, weights, wide, pool.out_w,
          a.filters, a.y + row * row_size, a.codes + row * row_size);
    }
  });
}

}  // namespace pycollective::nn
