// Convolution with 3 x 3 filters and stride 1 by Winograd's minimal filtering (Lavin and Gray,
// 2015).
//
// F(2 x 2, 3 x 3): a tile of 4 x 4 pixels gives 2 x 2 outputs. Each channel and filter takes 16
// products instead of 36. F(4 x 4, 3 x 3): a tile of 6 x 6 pixels gives 4 x 4 outputs with 36
// products instead of 144. After the transforms, these are 16 or 36 matrix products: [tiles,
// channels] by [channels, filters]. The transposed steps give the gradients. The transforms are V =
// B' x B, U = G w G' and D = A dz A'. Then dw = G' (V' D) G and dx = B (D U') B'.
//
// A tile has one or four whole 2 x 2 pooling windows, so that pooling works on outputs in
// registers.
#include <algorithm>
#include <cstring>

#include "nn/kernels.h"
#include "nn/processor.h"
#include "nn/scratch.h"
#include "nn/transpose.h"
#include "support/parallel.h"

namespace pycollective::nn {
namespace {

// Approximate bytes, and maximum number, of the tiles that are transformed and multiplied together.
// Each block reads all transformed filters and adds to their gradients, so that it should not be
// smaller than they are.
constexpr Index kBlockBytes = 1 << 18;
constexpr Index kMostTiles = 64;
// Rows and columns of a block of a matrix (see winograd.inc). The number of tiles is rounded up to
// kGroup, those of channels and filters to kWidest.
constexpr Index kGroup = 8;

// Returns the distance between adjacent matrices of a product. It is not a power of two: otherwise
// the numbers of a tile would compete for the same cache lines.
Index step_of(Index rows, Index wide) { return rows * wide + kWidest; }

struct Tile {
  Index pixel;            // index of its first pixel in the images; meaningless if outside
  TapRange down, across;  // its pixels inside the image
  bool inside;            // true if all its pixels are inside
  Index output;           // index of its first output
  Index rows, columns;    // size of its existing outputs
  Index window;           // index of its first pooling window
};

// The division of images into tiles, and the memory layout of a block of tiles.
struct Tiling {
  Index height, width, channels, filters, out_h, out_w, pad_top, pad_left;
  Index outputs, pixels;  // outputs and pixels per row of a tile
  Index down, across;     // tiles per column and row of an image
  Index x_wide, z_wide;   // channels and filters, rounded up to whole vectors
  Index block;            // tiles that are processed together
  Index v_step, z_step;   // distances between adjacent matrices of a block's products

  Tiling(const Window& w, Index filters_)
      : height(w.height),
        width(w.width),
        channels(w.channels),
        filters(filters_),
        out_h(w.out_h),
        out_w(w.out_w),
        pad_top(w.pad_top),
        pad_left(w.pad_left),
        // The transforms of larger tiles are more expensive: with 0.8 times the products, both
        // sizes take equally long. Larger tiles are used if they need at most 0.75 times the
        // products.
        outputs(4 * count_products(4) <= 3 * count_products(2) ? 4 : 2),
        pixels(outputs + 2),
        down((out_h + outputs - 1) / outputs),
        across((out_w + outputs - 1) / outputs),
        x_wide(round_up(channels, kWidest)),
        z_wide(round_up(filters, kWidest)) {
    const Index bytes = products() * (x_wide + z_wide) * static_cast<Index>(sizeof(float));
    const Index count = std::max(kBlockBytes / bytes, x_wide * z_wide / (x_wide + z_wide));
    block = std::clamp(count / kGroup * kGroup, kGroup, kMostTiles);
    v_step = step_of(block, x_wide);
    z_step = step_of(block, z_wide);
  }

  // Returns the products of one tile per channel and filter.
  Index products() const { return pixels * pixels; }
  Index per_image() const { return down * across; }  // in tiles

  Tile tile(Index number) const {
    const Index image = number / (down * across);
    const Index place = number % (down * across);
    const Index y = place / across * outputs, x = place % across * outputs;
    const Index row = y - pad_top, column = x - pad_left;
    const TapRange rows = inside(row, 1, pixels, height),
                   columns = inside(column, 1, pixels, width);
    return {(image * height + row) * width + column,
            rows,
            columns,
            rows.last - rows.first == pixels && columns.last - columns.first == pixels,
            (image * out_h + y) * out_w + x,
            std::min(outputs, out_h - y),
            std::min(outputs, out_w - x),
            (image * (out_h / 2) + y / 2) * (out_w / 2) + x / 2};
  }

 private:
  // Returns the products of one image with tiles of size x size outputs.
  Index count_products(Index size) const {
    return (out_h + size - 1) / size * ((out_w + size - 1) / size) * (size + 2) * (size + 2);
  }
};

// Tiles whose gradients are computed together. The results are null if they are not needed.
struct GradientBlock {
  Index first, count;
  float* v;     // transformed pixels [products, block, x_wide], then the gradients of the pixels
  float* d;     // transformed gradients of the outputs [products, block, z_wide]
  float* sums;  // gradient of the filters [products, x_wide, z_wide]
  float* bias_sums;
};

#define PYCOLLECTIVE_LOOPS "nn/winograd.inc"
#include "nn/targets.inc"

struct Loops {
  decltype(&base::transform_filters<2>) transform_filters;
  decltype(&base::transform_gradient<2>) transform_gradient;
  decltype(&base::forward_tiles<2>) forward_tiles;
  decltype(&base::transform_columns<2>) transform_columns;
  decltype(&base::multiply_block) multiply_block;
  decltype(&base::add_columns<2>) add_columns;
};

template <int kOutputs>
Loops pick_loops_of() {
#ifdef PYCOLLECTIVE_X86_TARGETS
  switch (vector_bytes()) {
    case 64:
      return {avx512::transform_filters<kOutputs>,
              avx512::transform_gradient<kOutputs>,
              avx512::forward_tiles<kOutputs>,
              avx512::transform_columns<kOutputs>,
              avx512::multiply_block,
              avx512::add_columns<kOutputs>};
    case 32:
      return {avx2::transform_filters<kOutputs>,
              avx2::transform_gradient<kOutputs>,
              avx2::forward_tiles<kOutputs>,
              avx2::transform_columns<kOutputs>,
              avx2::multiply_block,
              avx2::add_columns<kOutputs>};
  }
#endif
  return {base::transform_filters<kOutputs>,
          base::transform_gradient<kOutputs>,
          base::forward_tiles<kOutputs>,
          base::transform_columns<kOutputs>,
          base::multiply_block,
          base::add_columns<kOutputs>};
}

Loops pick_loops(const Tiling& t) {
  return t.outputs == 4 ? pick_loops_of<4>() : pick_loops_of<2>();
}

// Working memory of one part of a call, and of the whole call.
thread_local Scratch part_scratch, call_scratch;

}  // namespace

void winograd_forward(const ConvolutionForward& a) {
  const Tiling t(a.w, a.filters);
  const Loops loops = pick_loops(t);
  const Index filters_size = t.products() * step_of(t.channels, t.z_wide);
  call_scratch.reserve(filters_size + t.z_wide, 2);
  float* u = call_scratch.take(filters_size);
  float* bias = call_scratch.take(t.z_wide);
  in_parts(t.channels, [&](Index first, Index last) {
    loops.transform_filters(a.weights, t.channels, t.filters, t.z_wide, first, last, u);
  });
  std::fill(bias, bias + t.z_wide, 0.0f);
  if (a.bias) std::copy(a.bias, a.bias + t.filters, bias);
  const Index tiles = a.images * t.per_image();
  const Index products = tiles * t.products() * t.channels * t.filters;
  in_parts((tiles + kGroup - 1) / kGroup, products, [&](Index first, Index last) {
    loops.forward_tiles(a, t, u, bias, first * kGroup, std::min(last * kGroup, tiles),
                        part_scratch);
  });
}

void winograd_gradient(const WinogradGradient& a) {
  const Tiling t(a.w, a.filters);
  const Loops loops = pick_loops(t);
  // Each part has whole images. If there are fewer images than threads, the threads divide the
  // columns and products of each block instead.
  const int all = threads();
  const bool few = a.images < all;
  const int parts = few ? 1 : all;
  const Index filters_size = t.products() * step_of(t.filters, t.x_wide);
  const Index sums_size = t.products() * step_of(t.x_wide, t.z_wide);
  const Index turned_size = 9 * t.channels * t.filters;
  call_scratch.reserve(filters_size + turned_size + parts * (sums_size + t.z_wide), 2 + 2 * parts);
  float* u = call_scratch.take(filters_size);
  if (a.x_gradient) {
    float* turned = call_scratch.take(turned_size);
    for (Index tap = 0; tap < 9; ++tap) {
      const Index from = tap * t.channels * t.filters;
      transpose(a.weights + from, t.channels, t.filters, t.filters, turned + from, t.channels);
    }
    in_parts(t.filters, [&](Index first, Index last) {
      loops.transform_filters(turned, t.filters, t.channels, t.x_wide, first, last, u);
    });
  }
  // The sums of all parts, side by side.
  float* sums = call_scratch.take(parts * sums_size);
  float* bias_sums = call_scratch.take(parts * t.z_wide);
  std::fill(sums, sums + parts * sums_size, 0.0f);
  std::fill(bias_sums, bias_sums + parts * t.z_wide, 0.0f);
  const auto divide = [&](Index count, Index step, const auto& body) {
    if (!few) return body(Index{0}, count * step);
    in_parts(count, [&](Index first, Index last) { body(first * step, last * step); });
  };
  in_parallel(parts, [&](int part) {
    part_scratch.reserve(t.products() * (t.v_step + t.z_step), 2);
    GradientBlock block{};
    block.v = part_scratch.take(t.products() * t.v_step);
    block.d = part_scratch.take(t.products() * t.z_step);
    block.sums = a.weight_gradient ? sums + part * sums_size : nullptr;
    block.bias_sums = a.bias_gradient ? bias_sums + part * t.z_wide : nullptr;
    const Index last = begin_of_part(a.images, part + 1, parts) * t.per_image();
    block.first = begin_of_part(a.images, part, parts) * t.per_image();
    for (; block.first < last; block.first += t.block) {
      block.count = std::min(t.block, last - block.first);
      divide((t.x_wide + t.z_wide) / kWidest, kWidest,
             [&](Index from, Index to) { loops.transform_columns(a, t, block, from, to); });
      divide(t.products(), 1,
             [&](Index from, Index to) { loops.multiply_block(a, t, u, block, from, to); });
      if (!a.x_gradient) continue;
      divide(t.x_wide / kWidest, kWidest,
             [&](Index from, Index to) { loops.add_columns(a, t, block, from, to); });
    }
  });
  for (int part = 1; part < parts; ++part) {
    for (Index f = 0; f < t.z_wide; ++f) bias_sums[f] += bias_sums[part * t.z_wide + f];
  }
  in_parts(a.weight_gradient ? t.channels : 0, [&](Index first, Index last) {
    for (Index k = t.products(); k < parts * t.products(); ++k) {
      float* to = sums + k % t.products() * step_of(t.x_wide, t.z_wide);
      const float* from = to + k / t.products() * sums_size;
      for (Index i = first * t.z_wide; i < last * t.z_wide; ++i) to[i] += from[i];
    }
    loops.transform_gradient(sums, t.x_wide, t.z_wide, a.weight_gradient, t.channels, t.filters,
                             first, last);
  });
  if (a.bias_gradient) std::copy(bias_sums, bias_sums + t.filters, a.bias_gradient);
}

}  // namespace pycollective::nn
