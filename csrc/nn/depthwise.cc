// Sums over the taps of a window, channel by channel: depthwise convolution and average pooling.
#include <algorithm>
#include <cstring>
#include <vector>

#include "nn/kernels.h"
#include "nn/parallel.h"
#include "nn/processor.h"
#include "support/simd.h"

namespace pycollective::nn {
namespace {

// One tap of one result: pixels of `channels` numbers, and their weights or common factor.
template <typename T>
struct Tap {
  const T* source;
  const T* weights;
  T factor;
};

// One row of results. A place is the index of a source row or column, or -1 outside the image.
template <typename T>
struct Row {
  const T* image;       // the source image
  const T* weights;     // null: means
  const Index* down;    // [kernel_h] places of this row's taps
  const Index* across;  // [width, kernel_w] places of each column's taps
  const T* tall;        // the number of taps of a source row; null: the result's taps count
  const T* wide;        // the number of taps of a source column
  Index kernel_h, kernel_w, channels, source_width, width;
};

template <typename T>
struct Loops {
  void (*sum_row)(const Row<T>& a, Tap<T>* list, T* y);
  void (*average_row)(const Row<T>& a, Tap<T>* list, T* y);
  void (*multiply_row)(const Row<T>& a, const T* g, double* sums);
};

#define PYCOLLECTIVE_LOOPS "nn/depthwise.inc"
#include "nn/targets.inc"

template <typename T>
Loops<T> pick_loops() {
#ifdef PYCOLLECTIVE_X86_TARGETS
  switch (vector_bytes()) {
    case 64:
      return avx512::loops<T>();
    case 32:
      return avx2::loops<T>();
  }
#endif
  return base::loops<T>();
}

// Below this number of products, waking other threads does not pay.
constexpr Index kFew = 1 << 16;

struct Axis {
  std::vector<Index> places;  // of each result's taps in the source
  std::vector<Index> counts;  // of each output's taps inside the image
};

// One axis of a window: of its outputs, or, `back`, of the image's pixels.
Axis axis_of(Index size, Index out, Index kernel, Index stride, Index dilation, Index pad,
             bool back) {
  Axis axis;
  axis.places.assign(static_cast<std::size_t>((back ? size : out) * kernel), -1);
  axis.counts.assign(static_cast<std::size_t>(out), 0);
  for (Index o = 0; o < out; ++o) {
    for (Index k = 0; k < kernel; ++k) {
      const Index pixel = o * stride - pad + k * dilation;
      if (pixel < 0 || pixel >= size) continue;
      axis.places[static_cast<std::size_t>((back ? pixel : o) * kernel + k)] = back ? o : pixel;
      ++axis.counts[static_cast<std::size_t>(o)];
    }
  }
  return axis;
}

int parts_of(Index rows, Index products) {
  return products < kFew ? 1 : static_cast<int>(std::clamp<Index>(rows, 1, threads()));
}

struct Places {
  Axis down, across;
  Places(const Window& w, bool back)
      : down(axis_of(w.height, w.out_h, w.kernel_h, w.stride_h, w.dilation_h, w.pad_top, back)),
        across(axis_of(w.width, w.out_w, w.kernel_w, w.stride_w, w.dilation_w, w.pad_left, back)) {}
};

template <typename T>
void sum_taps(const T* source, const T* weights, T* y, const Window& w, Index images, bool back) {
  const Places places(w, back);
  const std::vector<T> tall(places.down.counts.begin(), places.down.counts.end());
  const std::vector<T> wide(places.across.counts.begin(), places.across.counts.end());
  const Index height = back ? w.height : w.out_h, width = back ? w.width : w.out_w;
  const Index from_h = back ? w.out_h : w.height, from_w = back ? w.out_w : w.width;
  const Index rows = images * height;
  const int parts = parts_of(rows, rows * width * w.patch());
  const auto run = weights ? pick_loops<T>().sum_row : pick_loops<T>().average_row;
  in_parallel(parts, [&](int part) {
    std::vector<Tap<T>> list(static_cast<std::size_t>(w.taps()));
    for (Index r = begin_of_part(rows, part, parts); r < begin_of_part(rows, part + 1, parts);
         ++r) {
      const Row<T> row{source + r / height * from_h * from_w * w.channels,
                       weights,
                       places.down.places.data() + r % height * w.kernel_h,
                       places.across.places.data(),
                       back ? tall.data() : nullptr,
                       wide.data(),
                       w.kernel_h,
                       w.kernel_w,
                       w.channels,
                       from_w,
                       width};
      run(row, list.data(), y + r * width * w.channels);
    }
  });
}

template <typename T>
void multiply_taps(const T* x, const T* g, T* weight_gradient, const Window& w, Index images) {
  const Places places(w, false);
  const Index rows = images * w.out_h;
  const int parts = parts_of(rows, rows * w.out_w * w.patch());
  const auto size = static_cast<std::size_t>(w.patch());
  const auto run = pick_loops<T>().multiply_row;
  std::vector<std::vector<double>> sums(static_cast<std::size_t>(parts), std::vector<double>(size));
  in_parallel(parts, [&](int part) {
    for (Index r = begin_of_part(rows, part, parts); r < begin_of_part(rows, part + 1, parts);
         ++r) {
      const Row<T> row{x + r / w.out_h * w.image(),
                       nullptr,
                       places.down.places.data() + r % w.out_h * w.kernel_h,
                       places.across.places.data(),
                       nullptr,
                       nullptr,
                       w.kernel_h,
                       w.kernel_w,
                       w.channels,
                       w.width,
                       w.out_w};
      run(row, g + r * w.out_w * w.channels, sums[static_cast<std::size_t>(part)].data());
    }
  });
  for (std::size_t k = 0; k < size; ++k) {
    double total = 0;
    for (const std::vector<double>& some : sums) total += some[k];
    weight_gradient[k] = static_cast<T>(total);
  }
}

}  // namespace

#define PYCOLLECTIVE_DEPTHWISE(T)                                                               \
  void depthwise_forward(const T* x, const T* weights, T* y, const Window& w, Index images) {   \
    sum_taps(x, weights, y, w, images, false);                                                  \
  }                                                                                             \
  void depthwise_gradient(const T* g, const T* weights, T* dx, const Window& w, Index images) { \
    sum_taps(g, weights, dx, w, images, true);                                                  \
  }                                                                                             \
  void depthwise_weight_gradient(const T* x, const T* g, T* weight_gradient, const Window& w,   \
                                 Index images) {                                                \
    multiply_taps(x, g, weight_gradient, w, images);                                            \
  }

PYCOLLECTIVE_DEPTHWISE(float)
PYCOLLECTIVE_DEPTHWISE(double)

}  // namespace pycollective::nn
