// Weighted sums of pixels, channel by channel: depthwise convolution, average pooling, resampling.
#include <algorithm>
#include <cstring>
#include <vector>

#include "nn/kernels.h"
#include "nn/processor.h"
#include "support/parallel.h"
#include "support/simd.h"

namespace pycollective::nn {
namespace {

// One tap of one result: a pixel of `channels` numbers, and their weights or common factor.
template <typename T>
struct Tap {
  const T* source;
  const T* weights;
  T factor;
};

// One row of results. A place is the index of a source row or column, or -1 outside the image.
template <typename T>
struct Row {
  const T* image;
  const T* weights;             // Null for means.
  const T* bias;                // Zeros if there is none.
  const Index* down;            // [kernel_h]: the places of this row's taps.
  const Index* across;          // [width, kernel_w]: the places of each column's taps.
  const std::uint8_t* shifted;  // [width]: true if a column is a shifted copy of an earlier one.
  const T* tall;                // Null, or the number of taps of each source row.
  const T* wide;                // The number of taps of each source column.
  // The taps of a shifted column are those of the column `period` before it, `shift` places on.
  Index period, shift, source_width, width;
  const Window& w;
};

// The nonzero weights of a resampling along one axis. Result r has the weights from begins[r] to
// begins[r + 1]. `places` has the index in the source for each weight.
template <typename T>
struct Blend {
  std::vector<Index> begins, places;
  std::vector<T> weights;
  Index most = 0;  // the largest number of weights of a result

  Index results() const { return static_cast<Index>(begins.size()) - 1; }

  void set(const T* matrix, Index rows, Index columns) {
    begins.assign(1, 0);
    places.clear();
    weights.clear();
    most = 0;
    for (Index r = 0; r < rows; ++r, matrix += columns) {
      for (Index c = 0; c < columns; ++c) {
        if (matrix[c] == 0) continue;
        places.push_back(c);
        weights.push_back(matrix[c]);
      }
      begins.push_back(static_cast<Index>(places.size()));
      most = std::max(most, begins[r + 1] - begins[r]);
    }
  }
};

template <typename T>
struct Loops {
  void (*sum_row)(const Row<T>& a, Tap<T>* list, T* y);
  void (*average_row)(const Row<T>& a, Tap<T>* list, T* y);
  void (*multiply_row)(const Row<T>& a, const T* g, T* sums);
  void (*blend_row)(const T* image, const Blend<T>& down, const Blend<T>& across, Index row,
                    Index source_width, Index channels, Tap<T>* list, T* y);
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

// Blocks of about this many products are summed in T, and the blocks' sums in double precision.
constexpr Index kShort = 1 << 9;
// Below this number of products, waking other threads takes longer than it saves.
constexpr Index kFew = 1 << 16;

struct Axis {
  std::vector<Index> places;          // of each result's taps in the source
  std::vector<Index> counts;          // of each output's taps inside the image
  std::vector<std::uint8_t> shifted;  // see Row

  // Sets the tables for one axis of a window. The results are its outputs or, with `back`, the
  // image's pixels.
  void set(Index size, Index out, Index kernel, Index stride, Index dilation, Index pad,
           bool back) {
    const Index results = back ? size : out;
    places.assign(static_cast<std::size_t>(results * kernel), -1);
    counts.assign(static_cast<std::size_t>(out), 0);
    for (Index o = 0; o < out; ++o) {
      for (Index k = 0; k < kernel; ++k) {
        const Index pixel = o * stride - pad + k * dilation;
        if (pixel < 0 || pixel >= size) continue;
        places[static_cast<std::size_t>((back ? pixel : o) * kernel + k)] = back ? o : pixel;
        ++counts[static_cast<std::size_t>(o)];
      }
    }
    const Index period = back ? stride : 1;
    shifted.assign(static_cast<std::size_t>(results), 0);
    for (Index r = period; r < results; ++r) {
      const Index* here = places.data() + r * kernel;
      const Index* before = here - period * kernel;
      bool same = true;
      for (Index k = 0; k < kernel; ++k) {
        const bool inside = here[k] >= 0 && before[k] >= 0;
        same &= (here[k] < 0) == (before[k] < 0);
        if (inside && back) {
          same &= counts[static_cast<std::size_t>(here[k])] ==
                  counts[static_cast<std::size_t>(before[k])];
        }
      }
      shifted[static_cast<std::size_t>(r)] = same;
    }
  }
};

int parts_of(Index rows, Index products) {
  return products < kFew ? 1 : static_cast<int>(std::clamp<Index>(rows, 1, threads()));
}

// The tables of a call, in memory that its thread keeps.
template <typename T>
struct Tables {
  Axis down, across;
  std::vector<T> tall, wide, zeros;
  std::vector<double> sums;

  static Tables& of(const Window& w, bool back) {
    thread_local Tables kept;
    kept.down.set(w.height, w.out_h, w.kernel_h, w.stride_h, w.dilation_h, w.pad_top, back);
    kept.across.set(w.width, w.out_w, w.kernel_w, w.stride_w, w.dilation_w, w.pad_left, back);
    kept.tall.assign(kept.down.counts.begin(), kept.down.counts.end());
    kept.wide.assign(kept.across.counts.begin(), kept.across.counts.end());
    kept.zeros.assign(static_cast<std::size_t>(w.channels), 0);
    return kept;
  }

  // The row number `row` of an image, whose source is `image`.
  Row<T> row(const T* image, const T* weights, const T* bias, Index row, const Window& w,
             bool back) const {
    return {image,
            weights,
            bias ? bias : zeros.data(),
            down.places.data() + row * w.kernel_h,
            across.places.data(),
            across.shifted.data(),
            back ? tall.data() : nullptr,
            wide.data(),
            back ? w.stride_w : 1,
            back ? 1 : w.stride_w,
            back ? w.out_w : w.width,
            back ? w.width : w.out_w,
            w};
  }
};

template <typename T>
void sum_taps(const T* source, const T* weights, const T* bias, T* y, const Window& w, Index images,
              bool back) {
  const Tables<T>& tables = Tables<T>::of(w, back);
  const Index height = back ? w.height : w.out_h, width = back ? w.width : w.out_w;
  const Index size = (back ? w.out_h * w.out_w : w.height * w.width) * w.channels;
  const Index rows = images * height;
  const int parts = parts_of(rows, rows * width * w.patch());
  const auto run = weights ? pick_loops<T>().sum_row : pick_loops<T>().average_row;
  in_parallel(parts, [&](int part) {
    thread_local std::vector<Tap<T>> list;
    list.resize(static_cast<std::size_t>(w.taps()));
    const Index last = begin_of_part(rows, part + 1, parts);
    for (Index r = begin_of_part(rows, part, parts); r < last; ++r) {
      run(tables.row(source + r / height * size, weights, bias, r % height, w, back), list.data(),
          y + r * width * w.channels);
    }
  });
}

template <typename T>
void blend(const T* x, const T* by_row, const T* by_column, T* y, const Resampling& r) {
  thread_local Blend<T> kept[2];
  Blend<T>& down = kept[0];
  Blend<T>& across = kept[1];
  down.set(by_row, r.out_h, r.height);
  across.set(by_column, r.out_w, r.width);
  const Index rows = r.images * r.out_h;
  const int parts = parts_of(rows, rows * r.out_w * r.channels);
  const auto run = pick_loops<T>().blend_row;
  in_parallel(parts, [&](int part) {
    thread_local std::vector<Tap<T>> list;
    list.resize(static_cast<std::size_t>(down.most * across.most));
    const Index last = begin_of_part(rows, part + 1, parts);
    for (Index at = begin_of_part(rows, part, parts); at < last; ++at) {
      run(x + at / r.out_h * r.height * r.width * r.channels, down, across, at % r.out_h, r.width,
          r.channels, list.data(), y + at * r.out_w * r.channels);
    }
  });
}

template <typename T>
void multiply_taps(const T* x, const T* g, T* weight_gradient, const Window& w, Index images) {
  Tables<T>& tables = Tables<T>::of(w, false);
  const Index rows = images * w.out_h, size = w.patch();
  const int parts = parts_of(rows, rows * w.out_w * size);
  const auto run = pick_loops<T>().multiply_row;
  tables.sums.assign(static_cast<std::size_t>(parts * size), 0);
  double* sums = tables.sums.data();
  const Index some = std::max<Index>(kShort / w.out_w, 1);
  in_parallel(parts, [&](int part) {
    thread_local std::vector<T> block;
    const Index last = begin_of_part(rows, part + 1, parts);
    for (Index first = begin_of_part(rows, part, parts); first < last; first += some) {
      block.assign(static_cast<std::size_t>(size), 0);
      for (Index r = first; r < std::min(first + some, last); ++r) {
        run(tables.row(x + r / w.out_h * w.image(), nullptr, nullptr, r % w.out_h, w, false),
            g + r * w.out_w * w.channels, block.data());
      }
      double* total = sums + part * size;
      for (const T sum : block) *total++ += static_cast<double>(sum);
    }
  });
  for (Index k = 0; k < size; ++k) {
    double total = 0;
    for (int part = 0; part < parts; ++part) total += sums[part * size + k];
    weight_gradient[k] = static_cast<T>(total);
  }
}

}  // namespace

#define PYCOLLECTIVE_DEPTHWISE(T)                                                               \
  void resample(const T* x, const T* down, const T* across, T* y, const Resampling& r) {        \
    blend(x, down, across, y, r);                                                               \
  }                                                                                             \
  void depthwise_forward(const T* x, const T* weights, const T* bias, T* y, const Window& w,    \
                         Index images) {                                                        \
    sum_taps(x, weights, bias, y, w, images, false);                                            \
  }                                                                                             \
  void depthwise_gradient(const T* g, const T* weights, T* dx, const Window& w, Index images) { \
    sum_taps(g, weights, static_cast<const T*>(nullptr), dx, w, images, true);                  \
  }                                                                                             \
  void depthwise_weight_gradient(const T* x, const T* g, T* weight_gradient, const Window& w,   \
                                 Index images) {                                                \
    multiply_taps(x, g, weight_gradient, w, images);                                            \
  }

PYCOLLECTIVE_DEPTHWISE(float)
PYCOLLECTIVE_DEPTHWISE(double)

}  // namespace pycollective::nn
