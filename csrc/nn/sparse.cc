// The gradients of convolution, relu and max pooling together. Only the maximum of each pooling
// window has a gradient, and relu removes some of these. The convolution's gradients are therefore
// sums over few hits (the remaining gradients), not products of matrices that are mostly zero.
//
// For the weights, each filter has a list of its hits. The patches at the hits are added, weighted
// by their gradients. For the images, the filters of each window are sorted by the position of
// their maximum, and their weights are added around it. With few channels, vectors hold numbers of
// several filters instead of channels: each filter selects its maximum's pixel.
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "nn/kernels.h"
#include "nn/pool.h"
#include "nn/processor.h"
#include "nn/scratch.h"
#include "nn/transpose.h"
#include "support/parallel.h"

#ifdef PYCOLLECTIVE_X86_TARGETS
#include <immintrin.h>
#endif

namespace pycollective::nn {
namespace {

// Filters whose weights are used together. For one vector of channels they stay in the first-level
// cache.
constexpr Index kGroup = 32;
constexpr Index kSlack = 16;
// With fewer channels, vectors of channels would be mostly empty.
constexpr Index kFewChannels = 8;
// Approximate bytes of the images whose hits are listed together.
constexpr Index kListedBytes = 1 << 15;

// A remaining gradient, and the offset of its patch.
struct Hit {
  std::int32_t offset;
  float gradient;
};

// Distances in an image: the caller's, or a copy with padding and with channels rounded up to whole
// vectors.
struct Layout {
  Index height, width;
  Index wide;          // channels, rounded up
  Index pixel;         // distance between adjacent pixels
  Index down, across;  // taps
  Index line, step;    // distances between adjacent taps
  Index filters, taps, pool_taps, windows;
  bool copied;
  bool usual;  // 3 x 3 taps with stride 1, and 2 x 2 pooling
  std::vector<std::int32_t> code_offsets, window_offsets;

  Layout(const Window& w, const Window& pool, Index filters_, bool by_channel)
      : height(std::max({w.height, w.height + w.pad_top,
                         (w.out_h - 1) * w.stride_h + (w.kernel_h - 1) * w.dilation_h + 1})),
        width(std::max({w.width, w.width + w.pad_left,
                        (w.out_w - 1) * w.stride_w + (w.kernel_w - 1) * w.dilation_w + 1})),
        wide(by_channel ? 1 : round_up(w.channels, kWidest)),
        pixel(wide),
        down(w.kernel_h),
        across(w.kernel_w),
        line(w.dilation_h * width * pixel),
        step(w.dilation_w * pixel),
        filters(filters_),
        taps(w.taps()),
        pool_taps(pool.taps()),
        windows(pool.out_h * pool.out_w),
        copied(height != w.height || width != w.width || wide != w.channels),
        usual(w.kernel_h == 3 && w.kernel_w == 3 && w.stride_h == 1 && w.stride_w == 1 &&
              w.dilation_h == 1 && w.dilation_w == 1 && pool.kernel_h == 2 && pool.kernel_w == 2) {
    const auto place = [&](Index row, Index column) {
      return static_cast<std::int32_t>((row * width + column) * pixel);
    };
    // Invalid codes have an offset too, so that loops need no check.
    code_offsets.resize(256, 0);
    for (Index code = 0; code < pool_taps; ++code) {
      code_offsets[static_cast<std::size_t>(code)] =
          place(code / pool.kernel_w * w.stride_h, code % pool.kernel_w * w.stride_w);
    }
    for (Index window = 0; window < windows; ++window) {
      window_offsets.push_back(place(window / pool.out_w * pool.stride_h * w.stride_h,
                                     window % pool.out_w * pool.stride_w * w.stride_w));
    }
  }

  Index size() const { return height * width * pixel; }
};

void copy_in(const float* x, const Window& w, const Layout& l, float* to) {
  std::fill(to, to + l.size(), 0.0f);
  to += (w.pad_top * l.width + w.pad_left) * l.pixel;
  for (Index row = 0; row < w.height; ++row) {
    for (Index column = 0; column < w.width; ++column, x += w.channels) {
      std::copy(x, x + w.channels, to + (row * l.width + column) * l.pixel);
    }
  }
}

void copy_out(const float* from, const Window& w, const Layout& l, float* x) {
  from += (w.pad_top * l.width + w.pad_left) * l.pixel;
  for (Index row = 0; row < w.height; ++row) {
    for (Index column = 0; column < w.width; ++column, x += w.channels) {
      const float* pixel = from + (row * l.width + column) * l.pixel;
      std::copy(pixel, pixel + w.channels, x);
    }
  }
}

#define PYCOLLECTIVE_LOOPS "nn/sparse.inc"
#include "nn/targets.inc"

struct Loops {
  decltype(&base::list_hits) list_hits;
  decltype(&base::add_hits) add_hits;
  decltype(&base::add_bias) add_bias;
  decltype(&base::sort_hits) sort_hits;
  decltype(&base::add_all_weights) add_all_weights;
  decltype(&base::add_quads) add_quads;
};

Loops pick_loops() {
#ifdef PYCOLLECTIVE_X86_TARGETS
  switch (vector_bytes()) {
    case 64:
      return {avx512::list_hits, avx512::add_hits,        avx512::add_bias,
              avx512::sort_hits, avx512::add_all_weights, avx512::add_quads};
    case 32:
      return {avx2::list_hits, avx2::add_hits,        avx2::add_bias,
              avx2::sort_hits, avx2::add_all_weights, avx2::add_quads};
  }
#endif
  return {base::list_hits, base::add_hits,        base::add_bias,
          base::sort_hits, base::add_all_weights, base::add_quads};
}

thread_local Scratch part_scratch, call_scratch;

// The values that all parts of a call share.
struct Call {
  const SparseGradient& a;
  const Layout& l;
  const Loops& loops;
  const float* weights;  // [filters, taps, wide]
  Index in, out;         // sizes of an image and of its part of g
};

// Adds the contributions of images [first, last) to sums [filters, taps, wide].
void add_weight_gradient(const Call& call, Index first, Index last, float* sums) {
  const Layout& l = call.l;
  const Index pass_images =
      std::clamp<Index>(kListedBytes / static_cast<Index>(l.size() * sizeof(float)), 1, 8);
  const Index capacity = pass_images * l.windows + 1;
  Scratch& scratch = part_scratch;
  scratch.reserve((l.copied ? pass_images * l.size() : 0) + 2 * l.filters * capacity + l.filters,
                  3);
  float* copies = l.copied ? scratch.take(pass_images * l.size()) : nullptr;
  Hit* hits = reinterpret_cast<Hit*>(scratch.take(2 * l.filters * capacity));
  auto* counts = reinterpret_cast<std::int32_t*>(scratch.take(l.filters));
  for (Index begin = first; begin < last; begin += pass_images) {
    const Index images = std::min(pass_images, last - begin);
    std::fill(counts, counts + l.filters, 0);
    for (Index n = 0; n < images; ++n) {
      if (l.copied) copy_in(call.a.x + (begin + n) * call.in, call.a.w, l, copies + n * l.size());
      call.loops.list_hits(l, call.a.g + (begin + n) * call.out,
                           call.a.codes + (begin + n) * call.out,
                           static_cast<std::int32_t>(n * l.size()), hits, capacity, counts);
    }
    const float* x = l.copied ? copies : call.a.x + begin * call.in;
    for (Index f = 0; f < l.filters; ++f) {
      if (counts[f] == 0) continue;
      call.loops.add_hits(l, x, hits + f * capacity, counts[f], sums + f * l.taps * l.wide);
    }
  }
}

// The same for few channels, with a layout of one channel: sums [channels, taps, wide] and bias
// [wide].
void add_few_channels(const Call& call, const Layout& l, Index first, Index last, Index wide,
                      float* sums, float* bias) {
  const Window& w = call.a.w;
  const Index pixels = l.height * l.width;
  part_scratch.reserve(5 * pixels + l.width + 1 + wide, 3);
  float* plane = part_scratch.take(pixels + l.width + 1);
  float* quads = part_scratch.take(4 * pixels);
  float* unused = part_scratch.take(wide);
  std::fill(plane, plane + pixels + l.width + 1, 0.0f);
  for (Index n = first; n < last; ++n) {
    for (Index c = 0; c < w.channels; ++c) {
      for (Index row = 0; row < w.height; ++row) {
        const float* x = call.a.x + n * call.in + row * w.width * w.channels + c;
        float* to = plane + (row + w.pad_top) * l.width + w.pad_left;
        for (Index column = 0; column < w.width; ++column) to[column] = x[column * w.channels];
      }
      for (Index p = 0; p < pixels; ++p) {
        const float quad[4] = {plane[p], plane[p + 1], plane[p + l.width], plane[p + l.width + 1]};
        std::copy(quad, quad + 4, quads + 4 * p);
      }
      call.loops.add_quads(l, quads, call.a.g + n * call.out, call.a.codes + n * call.out, wide,
                           sums + c * l.taps * wide, c == 0 ? bias : unused);
    }
  }
}

void fill_image_gradient(const Call& call, Index first, Index last) {
  const Layout& l = call.l;
  const Index groups = (l.filters + kGroup - 1) / kGroup;
  Scratch& scratch = part_scratch;
  scratch.reserve(
      (l.copied ? l.size() : 0) + 2 * (call.out + kSlack) + groups * l.windows * l.pool_taps, 4);
  float* copy = l.copied ? scratch.take(l.size()) : nullptr;
  auto* places = reinterpret_cast<std::int32_t*>(scratch.take(call.out + kSlack));
  float* gradients = scratch.take(call.out + kSlack);
  auto* ends = reinterpret_cast<std::int32_t*>(scratch.take(groups * l.windows * l.pool_taps));
  for (Index n = first; n < last; ++n) {
    float* dx = call.a.x_gradient + n * call.in;
    float* to = l.copied ? copy : dx;
    std::fill(to, to + l.size(), 0.0f);
    call.loops.sort_hits(l, call.a.g + n * call.out, call.a.codes + n * call.out, places, gradients,
                         ends);
    call.loops.add_all_weights(l, call.weights, places, gradients, ends, to);
    if (l.copied) copy_out(copy, call.a.w, l, dx);
  }
}

}  // namespace

bool sparse_fits(const Window& w, Index filters) {
  constexpr double kMost = std::numeric_limits<std::int32_t>::max();
  const double wide = static_cast<double>(round_up(w.channels, kWidest));
  const double rows =
      static_cast<double>(w.height + w.pad_top + w.out_h * w.stride_h + w.kernel_h * w.dilation_h);
  const double columns =
      static_cast<double>(w.width + w.pad_left + w.out_w * w.stride_w + w.kernel_w * w.dilation_w);
  return rows * columns * wide < kMost && static_cast<double>(filters * w.taps()) * wide < kMost;
}

void sparse_gradient(const SparseGradient& a) {
  const Loops loops = pick_loops();
  const Layout l(a.w, a.pool, a.filters, false);
  const Layout flat(a.w, a.pool, a.filters, true);
  const bool few = a.w.channels < kFewChannels && l.usual;
  const int parts = static_cast<int>(std::clamp<Index>(a.images, 1, threads()));
  const Index bias_size = round_up(l.filters, kWidest);
  const Index weights_size = l.taps * std::max(l.filters * l.wide, a.w.channels * bias_size);
  call_scratch.reserve((1 + parts) * weights_size + parts * bias_size, 1 + 2 * parts);
  float* weights = call_scratch.take(weights_size);
  float* sums = call_scratch.take(parts * weights_size);
  float* bias_sums = call_scratch.take(parts * bias_size);
  const Call call{a, l, loops, weights, a.w.image(), l.windows * l.filters};
  const Index channels = a.w.channels;
  if (a.x_gradient) {
    std::fill(weights, weights + weights_size, 0.0f);
    for (Index tap = 0; tap < l.taps; ++tap) {
      transpose(a.weights + tap * channels * l.filters, channels, l.filters, l.filters,
                weights + tap * l.wide, l.taps * l.wide);
    }
  }
  in_parallel(parts, [&](int part) {
    const Index first = begin_of_part(a.images, part, parts);
    const Index last = begin_of_part(a.images, part + 1, parts);
    float* bias_to = bias_sums + part * bias_size;
    std::fill(bias_to, bias_to + bias_size, 0.0f);
    const bool joined = few && a.weight_gradient;
    if (a.bias_gradient && !joined) {
      loops.add_bias(a.g + first * call.out, a.codes + first * call.out, (last - first) * l.windows,
                     l.filters, bias_to);
    }
    if (a.weight_gradient) {
      float* to = sums + part * weights_size;
      std::fill(to, to + weights_size, 0.0f);
      if (joined) {
        add_few_channels(call, flat, first, last, bias_size, to, bias_to);
      } else {
        add_weight_gradient(call, first, last, to);
      }
    }
    if (a.x_gradient) fill_image_gradient(call, first, last);
  });
  for (int part = 1; part < parts; ++part) {
    if (a.weight_gradient) {
      for (Index i = 0; i < weights_size; ++i) sums[i] += sums[part * weights_size + i];
    }
    if (a.bias_gradient) {
      for (Index f = 0; f < l.filters; ++f) bias_sums[f] += bias_sums[part * bias_size + f];
    }
  }
  if (a.bias_gradient) std::copy(bias_sums, bias_sums + l.filters, a.bias_gradient);
  if (!a.weight_gradient) return;
  if (few) {
    for (Index k = 0; k < l.taps * channels; ++k) {
      const float* from = sums + (k % channels * l.taps + k / channels) * bias_size;
      std::copy(from, from + l.filters, a.weight_gradient + k * l.filters);
    }
    return;
  }
  for (Index tap = 0; tap < l.taps; ++tap) {
    transpose(sums + tap * l.wide, l.filters, channels, l.taps * l.wide,
              a.weight_gradient + tap * channels * l.filters, l.filters);
  }
}

}  // namespace pycollective::nn
