#include <cstring>

#include "nn/kernels.h"
#include "support/simd.h"

namespace pycollective::nn {
namespace {

// Calls visit(pixel, cells) for each run of taps that is contiguous in the image. `pixel` is the
// index of the run's first scalar in x, or -1 in the padding; `cells` is the number of scalars.
template <typename Visit>
PYCOLLECTIVE_INLINE void visit_runs(const Window& w, Index first, Index rows, Visit visit) {
  const Index c = w.channels;
  const bool dense = w.dilation_w == 1;
  for (Index row = first; row < first + rows; ++row) {
    const Index image = row / w.out_h * w.height;
    const Index top = row % w.out_h * w.stride_h - w.pad_top;
    for (Index out = 0; out < w.out_w; ++out) {
      const Index left = out * w.stride_w - w.pad_left;
      const TapRange taps = inside(left, w.dilation_w, w.kernel_w, w.width);
      for (Index i = 0; i < w.kernel_h; ++i) {
        const Index y = top + i * w.dilation_h;
        if (y < 0 || y >= w.height || taps.first >= taps.last) {
          visit(Index{-1}, w.kernel_w * c);
          continue;
        }
        if (taps.first > 0) visit(Index{-1}, taps.first * c);
        const Index pixel = ((image + y) * w.width + left) * c;
        if (dense) {
          visit(pixel + taps.first * c, (taps.last - taps.first) * c);
        } else {
          for (Index j = taps.first; j < taps.last; ++j) visit(pixel + j * w.dilation_w * c, c);
        }
        if (taps.last < w.kernel_w) visit(Index{-1}, (w.kernel_w - taps.last) * c);
      }
    }
  }
}

template <typename T>
PYCOLLECTIVE_INLINE void im2col_body(const T* __restrict x, T* __restrict cols, const Window& w,
                                     Index first, Index rows) {
  visit_runs(w, first, rows, [&](Index pixel, Index cells) {
    if (pixel < 0) {
      std::memset(cols, 0, static_cast<std::size_t>(cells) * sizeof(T));
    } else {
      for (Index k = 0; k < cells; ++k) cols[k] = x[pixel + k];
    }
    cols += cells;
  });
}

template <typename T>
PYCOLLECTIVE_INLINE void col2im_body(const T* __restrict cols, T* __restrict x, const Window& w,
                                     Index first, Index rows) {
  visit_runs(w, first, rows, [&](Index pixel, Index cells) {
    if (pixel >= 0) {
      for (Index k = 0; k < cells; ++k) x[pixel + k] += cols[k];
    }
    cols += cells;
  });
}

}  // namespace

PYCOLLECTIVE_CLONES void im2col(const float* x, float* cols, const Window& w, Index first,
                                Index rows) {
  im2col_body(x, cols, w, first, rows);
}
PYCOLLECTIVE_CLONES void im2col(const double* x, double* cols, const Window& w, Index first,
                                Index rows) {
  im2col_body(x, cols, w, first, rows);
}
PYCOLLECTIVE_CLONES void col2im(const float* cols, float* x, const Window& w, Index first,
                                Index rows) {
  col2im_body(cols, x, w, first, rows);
}
PYCOLLECTIVE_CLONES void col2im(const double* cols, double* x, const Window& w, Index first,
                                Index rows) {
  col2im_body(cols, x, w, first, rows);
}

}  // namespace pycollective::nn
