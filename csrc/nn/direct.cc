// Convolution with few input channels. For short patches (K = taps * channels), copying patches and
// calling BLAS takes longer than the products. This kernel reads patches in place, from an image
// that is padded first if necessary. The filters of each tap lie side by side in vectors.
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "nn/kernels.h"
#include "nn/lanes.h"
#include "nn/parallel.h"
#include "nn/pool.h"
#include "nn/processor.h"

namespace pycollective::nn {
namespace {

// The values that are equal for all images of a call, and working memory.
template <typename T>
struct Plan {
  Window w;             // over the padded image, so without padding
  Index filters, wide;  // wide: filters rounded up to whole vectors
  Index patch, step;    // step: distance in the image between adjacent outputs
  bool padded;
  std::vector<Index> offsets;  // offset of each number of a patch
  std::vector<T>& image;
  std::vector<T>& weights;  // [patch, wide]
  std::vector<T>& rows;     // rows of the output or its gradient, and one spare vector
};

// Kept between calls, because new memory is slow. At most an image, 64 rows of weights and a few
// output rows.
template <typename T>
struct Scratch {
  std::vector<T> image, weights, rows;
};

template <typename T>
Plan<T> make_plan(const Window& w, Index filters, Index rows) {
  thread_local Scratch<T> scratch;
  constexpr Index kCount = Lanes<T>::kCount;
  Window inner = w;
  inner.height =
      std::max(w.height, (w.out_h - 1) * w.stride_h + (w.kernel_h - 1) * w.dilation_h + 1);
  inner.width = std::max(w.width, (w.out_w - 1) * w.stride_w + (w.kernel_w - 1) * w.dilation_w + 1);
  inner.height = std::max(inner.height, w.height + w.pad_top);
  inner.width = std::max(inner.width, w.width + w.pad_left);
  inner.pad_top = inner.pad_left = 0;
  Plan<T> plan{inner,
               filters,
               (filters + kCount - 1) / kCount * kCount,
               w.patch(),
               w.stride_w * w.channels,
               inner.height != w.height || inner.width != w.width,
               {},
               scratch.image,
               scratch.weights,
               scratch.rows};
  for (Index i = 0; i < w.kernel_h; ++i) {
    for (Index j = 0; j < w.kernel_w; ++j) {
      for (Index c = 0; c < w.channels; ++c) {
        plan.offsets.push_back((i * w.dilation_h * inner.width + j * w.dilation_w) * w.channels +
                               c);
      }
    }
  }
  if (plan.padded) plan.image.assign(static_cast<std::size_t>(inner.image()), T{0});
  plan.weights.assign(static_cast<std::size_t>(plan.patch * plan.wide), T{0});
  plan.rows.resize(static_cast<std::size_t>(rows * w.out_w * filters + kCount));
  return plan;
}

// Returns the image itself, or a copy surrounded by zeros.
template <typename T>
const T* pad_image(const T* x, const Plan<T>& plan, const Window& w) {
  if (!plan.padded) return x;
  const Index line = w.width * w.channels;
  T* to = plan.image.data() + (w.pad_top * plan.w.width + w.pad_left) * w.channels;
  for (Index row = 0; row < w.height; ++row) {
    std::copy(x + row * line, x + (row + 1) * line, to + row * plan.w.width * w.channels);
  }
  return plan.image.data();
}

#define PYCOLLECTIVE_LOOPS "nn/direct_rows.inc"
#include "nn/targets.inc"

template <typename T>
struct RowKernels {
  void (*forward)(const T* x, const Plan<T>& plan, Index row, T* z);
  void (*gradient)(const T* x, const Plan<T>& plan, Index row, const T* dz);
};

template <typename T>
RowKernels<T> pick_rows() {
#ifdef PYCOLLECTIVE_X86_TARGETS
  switch (vector_bytes()) {
    case 64:
      return {avx512::forward_row<T>, avx512::gradient_row<T>};
    case 32:
      return {avx2::forward_row<T>, avx2::gradient_row<T>};
  }
#endif
  return {base::forward_row<T>, base::gradient_row<T>};
}

// A kernel for one row of pooling windows over one padded image; null if there is none.
using PooledRow = void (*)(const float* x, const Plan<float>& plan, const float* bias,
                           Index windows, float* y, std::uint8_t* codes);

PooledRow pick_pooled_row(Index channels) {
#ifdef PYCOLLECTIVE_X86_TARGETS
  switch (vector_bytes()) {
    case 64:
      return channels == 1   ? avx512::pooled_row<1>
             : channels == 3 ? avx512::pooled_row<3>
                             : nullptr;
    case 32:
      return channels == 1 ? avx2::pooled_row<1> : channels == 3 ? avx2::pooled_row<3> : nullptr;
  }
#endif
  return channels == 1 ? base::pooled_row<1> : channels == 3 ? base::pooled_row<3> : nullptr;
}

// Returns false if there is no kernel. The kernels are for images of one or three channels, 3 x 3
// filters, relu, and 2 x 2 pooling.
template <typename T>
bool pooled_forward(const DirectForward<T>& a, const Plan<T>& plan) {
  if constexpr (std::is_same_v<T, float>) {
    const Window& w = a.w;
    const PooledRow pooled_row = pick_pooled_row(w.channels);
    const bool usual = w.kernel_h == 3 && w.kernel_w == 3 && w.stride_h == 1 && w.stride_w == 1 &&
                       w.dilation_h == 1 && w.dilation_w == 1 && a.pool && a.pool->kernel_h == 2 &&
                       a.pool->kernel_w == 2 && a.pool->stride_h == 2 && a.pool->stride_w == 2;
    if (!pooled_row || !usual || !a.relu) return false;
    std::vector<float> bias(static_cast<std::size_t>(plan.wide), 0.0f);
    if (a.bias) std::copy(a.bias, a.bias + a.filters, bias.begin());
    const Index size = a.pool->out_w * a.filters;
    for (Index n = 0; n < a.images; ++n) {
      const float* x = pad_image(a.x + n * w.image(), plan, w);
      for (Index row = 0; row < a.pool->out_h; ++row) {
        const Index at = (n * a.pool->out_h + row) * size;
        pooled_row(x + 2 * row * plan.w.width * w.channels, plan, bias.data(), a.pool->out_w,
                   a.y + at, a.codes + at);
      }
    }
    return true;
  }
  return false;
}

template <typename T>
void direct_forward_body(const DirectForward<T>& a) {
  const Window& w = a.w;
  const Index row_size = w.out_w * a.filters;
  const RowKernels<T> rows = pick_rows<T>();
  const Plan<T> plan = make_plan<T>(w, a.filters, a.pool ? a.pool->kernel_h : 0);
  for (Index k = 0; k < plan.patch; ++k) {
    std::copy(a.weights + k * a.filters, a.weights + (k + 1) * a.filters,
              plan.weights.data() + k * plan.wide);
  }
  if (pooled_forward(a, plan)) return;
  T* y = a.y;
  std::uint8_t* codes = a.codes;
  for (Index n = 0; n < a.images; ++n) {
    const T* x = pad_image(a.x + n * w.image(), plan, w);
    if (!a.pool) {
      for (Index row = 0; row < w.out_h; ++row, y += row_size) {
        rows.forward(x, plan, row, y);
        bias_relu(y, a.bias, w.out_w, a.filters, a.relu);
      }
      continue;
    }
    // `strip` is the window over the rows that one row of pooling windows needs.
    Window strip = *a.pool;
    strip.height = strip.kernel_h;
    strip.out_h = 1;
    const Index pooled = strip.out_w * a.filters;
    for (Index row = 0; row < a.pool->out_h; ++row, y += pooled, codes += pooled) {
      for (Index i = 0; i < strip.kernel_h; ++i) {
        rows.forward(x, plan, row * strip.stride_h + i, plan.rows.data() + i * row_size);
      }
      max_pool(plan.rows.data(), a.bias, y, codes, strip, 1, a.relu);
    }
  }
}

template <typename T>
void direct_gradient_body(const DirectGradient<T>& a) {
  const Window& w = a.w;
  const Index row_size = w.out_w * a.filters;
  const RowKernels<T> rows = pick_rows<T>();
  const Plan<T> plan = make_plan<T>(w, a.filters, a.pool ? a.pool->kernel_h : 1);
  if (a.bias_gradient) std::fill(a.bias_gradient, a.bias_gradient + a.filters, T{0});
  const T* g = a.g;
  T* dz = plan.rows.data();
  std::fill(plan.rows.end() - Lanes<T>::kCount, plan.rows.end(), T{0});
  for (Index n = 0; n < a.images; ++n) {
    const T* x = pad_image(a.x + n * w.image(), plan, w);
    if (!a.pool) {
      for (Index row = 0; row < w.out_h; ++row, g += row_size) {
        relu_gradient(g, a.y ? a.y + (g - a.g) : nullptr, dz, a.bias_gradient, w.out_w, a.filters);
        rows.gradient(x, plan, row, dz);
      }
      continue;
    }
    Window strip = *a.pool;
    strip.height = strip.kernel_h;
    strip.out_h = 1;
    const Index pooled = strip.out_w * a.filters;
    for (Index row = 0; row < a.pool->out_h; ++row, g += pooled) {
      max_pool_gradient(g, a.codes + (g - a.g), dz, a.bias_gradient, strip, 1);
      for (Index i = 0; i < strip.kernel_h; ++i) {
        rows.gradient(x, plan, row * strip.stride_h + i, dz + i * row_size);
      }
    }
  }
  for (Index k = 0; k < plan.patch; ++k) {
    const T* from = plan.weights.data() + k * plan.wide;
    std::copy(from, from + a.filters, a.weight_gradient + k * a.filters);
  }
}

// Returns the size of one image's part of the result.
template <typename A>
Index result_size(const A& a) {
  return (a.pool ? a.pool->out_h * a.pool->out_w : a.w.out_h * a.w.out_w) * a.filters;
}

template <typename T>
void forward_parts(const DirectForward<T>& a) {
  const int parts = static_cast<int>(std::min<Index>(a.images, threads()));
  in_parallel(parts, [&](int part) {
    const Index first = begin_of_part(a.images, part, parts);
    DirectForward<T> mine = a;
    mine.images = begin_of_part(a.images, part + 1, parts) - first;
    mine.x += first * a.w.image();
    mine.y += first * result_size(a);
    if (a.codes) mine.codes += first * result_size(a);
    direct_forward_body(mine);
  });
}

template <typename T>
void gradient_parts(const DirectGradient<T>& a) {
  const int parts = static_cast<int>(std::clamp<Index>(a.images, 1, threads()));
  const Index weights = a.w.patch() * a.filters;
  const Index size = weights + a.filters;
  std::vector<T> sums(static_cast<std::size_t>(parts * size));
  in_parallel(parts, [&](int part) {
    const Index first = begin_of_part(a.images, part, parts);
    DirectGradient<T> mine = a;
    mine.images = begin_of_part(a.images, part + 1, parts) - first;
    mine.x += first * a.w.image();
    mine.g += first * result_size(a);
    if (a.y) mine.y += first * result_size(a);
    if (a.codes) mine.codes += first * result_size(a);
    mine.weight_gradient = sums.data() + part * size;
    if (a.bias_gradient) mine.bias_gradient = mine.weight_gradient + weights;
    direct_gradient_body(mine);
  });
  for (Index i = size; i < parts * size; ++i) {
    sums[static_cast<std::size_t>(i % size)] += sums[static_cast<std::size_t>(i)];
  }
  std::copy(sums.begin(), sums.begin() + weights, a.weight_gradient);
  if (a.bias_gradient) std::copy(sums.begin() + weights, sums.begin() + size, a.bias_gradient);
}

}  // namespace

void direct_forward(const DirectForward<float>& a) { forward_parts(a); }
void direct_forward(const DirectForward<double>& a) { forward_parts(a); }
void direct_gradient(const DirectGradient<float>& a) { gradient_parts(a); }
void direct_gradient(const DirectGradient<double>& a) { gradient_parts(a); }

}  // namespace pycollective::nn
