// Convolution with few input channels: with so few numbers in a patch (K = taps * channels),
// copying patches and calling BLAS costs more than the products. Here the patch is read in place,
// from an image that is padded first where it has to be, and the filters lie side by side in a
// vector.
#include <algorithm>
#include <vector>

#include "nn/kernels.h"
#include "nn/lanes.h"
#include "nn/pool.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define PYCOLLECTIVE_X86_TARGETS
#endif

namespace pycollective::nn {
namespace {

// Everything that does not change from image to image, and memory to work in.
template <typename T>
struct Plan {
  Window w;             // over the padded image: no padding any more
  Index filters, wide;  // `wide`: filters rounded up to whole vectors
  Index patch, step;    // step: from one output to the next in the image
  bool padded;
  std::vector<Index> offsets;  // of each number of a patch
  std::vector<T>& image;
  std::vector<T>& weights;  // [patch, wide]
  std::vector<T>& rows;     // rows of convolution output or its gradient, and a vector to overrun
};

// Kept from call to call: fresh memory is slow. Three vectors of at most an image, 64 rows of
// weights and a few output rows each.
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

// The image itself, or its copy in the middle of zeros.
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

namespace base {
#define PYCOLLECTIVE_TARGET
#include "nn/direct_rows.inc"
#undef PYCOLLECTIVE_TARGET
}  // namespace base

#ifdef PYCOLLECTIVE_X86_TARGETS
namespace avx2 {
#define PYCOLLECTIVE_TARGET __attribute__((target("arch=x86-64-v3")))
#include "nn/direct_rows.inc"
#undef PYCOLLECTIVE_TARGET
}  // namespace avx2
namespace avx512 {
#define PYCOLLECTIVE_TARGET __attribute__((target("arch=x86-64-v4")))
#include "nn/direct_rows.inc"
#undef PYCOLLECTIVE_TARGET
}  // namespace avx512
#endif

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

template <typename T>
const RowKernels<T> kRows = pick_rows<T>();

template <typename T>
void direct_forward_body(const DirectForward<T>& a) {
  const Window& w = a.w;
  const Index row_size = w.out_w * a.filters;
  const Plan<T> plan = make_plan<T>(w, a.filters, a.pool ? a.pool->kernel_h : 0);
  for (Index k = 0; k < plan.patch; ++k) {
    std::copy(a.weights + k * a.filters, a.weights + (k + 1) * a.filters,
              plan.weights.data() + k * plan.wide);
  }
  T* y = a.y;
  std::uint8_t* codes = a.codes;
  for (Index n = 0; n < a.images; ++n) {
    const T* x = pad_image(a.x + n * w.image(), plan, w);
    if (!a.pool) {
      for (Index row = 0; row < w.out_h; ++row, y += row_size) {
        kRows<T>.forward(x, plan, row, y);
        bias_relu(y, a.bias, w.out_w, a.filters, a.relu);
      }
      continue;
    }
    // One row of pooling windows: `strip` is the window over the rows it needs.
    Window strip = *a.pool;
    strip.height = strip.kernel_h;
    strip.out_h = 1;
    const Index pooled = strip.out_w * a.filters;
    for (Index row = 0; row < a.pool->out_h; ++row, y += pooled, codes += pooled) {
      for (Index i = 0; i < strip.kernel_h; ++i) {
        kRows<T>.forward(x, plan, row * strip.stride_h + i, plan.rows.data() + i * row_size);
      }
      max_pool(plan.rows.data(), a.bias, y, codes, strip, 1, a.relu);
    }
  }
}

template <typename T>
void direct_gradient_body(const DirectGradient<T>& a) {
  const Window& w = a.w;
  const Index row_size = w.out_w * a.filters;
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
        kRows<T>.gradient(x, plan, row, dz);
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
        kRows<T>.gradient(x, plan, row * strip.stride_h + i, dz + i * row_size);
      }
    }
  }
  for (Index k = 0; k < plan.patch; ++k) {
    const T* from = plan.weights.data() + k * plan.wide;
    std::copy(from, from + a.filters, a.weight_gradient + k * a.filters);
  }
}

}  // namespace

int vector_bytes() {
#ifdef PYCOLLECTIVE_X86_TARGETS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return 64;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi2")) {
    return 32;
  }
#endif
  return 16;
}

void direct_forward(const DirectForward<float>& a) { direct_forward_body(a); }
void direct_forward(const DirectForward<double>& a) { direct_forward_body(a); }
void direct_gradient(const DirectGradient<float>& a) { direct_gradient_body(a); }
void direct_gradient(const DirectGradient<double>& a) { direct_gradient_body(a); }

}  // namespace pycollective::nn
