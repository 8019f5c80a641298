// Convolution of any shape. The patches of a block of output rows are copied side by side and
// multiplied with the filters. Bias, relu and pooling follow while the products are in cache.
#include <algorithm>

#include "nn/kernels.h"
#include "nn/products.h"
#include "support/parallel.h"

namespace pycollective::nn {
namespace {

// Approximate size of a block's patches. Patches, products and filters of most layers then stay in
// the second-level cache.
constexpr Index kBlockBytes = 1 << 18;
// The fewest outputs of a block. Each block reads all filters, and adds to all of their gradients.
constexpr Index kBlockOutputs = 256;

// The fewest outputs of a part of an image in gradients.
constexpr Index kLeastOutputs = 128;

thread_local Scratch part_scratch, product_scratch, call_scratch;

// The sizes that all blocks of a call share.
struct Blocks {
  Index patch, filters, row;  // row: outputs per output row
  Index unit;                 // output rows of a pooling window, which stay in one block
  Index step;                 // output rows per block
  bool pointwise;             // patches are the images' own rows, and need no copy

  Blocks(const Window& w, const Window* pool, Index filters_)
      : patch(w.patch()),
        filters(filters_),
        row(w.out_w),
        unit(pool ? pool->stride_h : 1),
        pointwise(w.taps() == 1 && w.stride_h == 1 && w.stride_w == 1 && w.out_h == w.height &&
                  w.out_w == w.width) {
    const Index bytes = row * std::max(patch, filters) * static_cast<Index>(sizeof(float));
    const Index rows = std::max(kBlockBytes / bytes, (kBlockOutputs + row - 1) / row);
    step = std::max<Index>(rows / unit, 1) * unit;
  }
};

// Copies the right factor of all blocks to `to`.
Factor packed(const Products& products, const Factor& b, Index columns, Index depth, float* to) {
  in_parts(products.count_panels(columns),
           [&](Index first, Index last) { products.pack(b, columns, depth, first, last, to); });
  return {to, 0, 0, true};
}

// Returns the window for one row of pooling windows.
Window strip_of(const Window& pool) {
  Window strip = pool;
  strip.height = pool.stride_h;
  strip.out_h = 1;
  return strip;
}

// Returns the number of parts into which a gradient is divided. Each needs sums of its own for all
// filters, so that parts with few products would take longer.
int count_gradient_parts(const BlockedGradient& a, const Blocks& blocks) {
  if (a.images >= threads()) return threads();
  constexpr Index kMostCopied = 1 << 24;  // numbers in the copies of images
  const Index rows = a.images * a.w.out_h / blocks.unit;
  const Index most =
      std::min({Index{threads()}, rows, kMostCopied / std::max<Index>(2 * a.w.image(), 1),
                rows * blocks.unit * blocks.row / kLeastOutputs});
  return static_cast<int>(std::max({most, a.images, Index{1}}));
}

}  // namespace

void blocked_forward(const ConvolutionForward& a) {
  const Window& w = a.w;
  const Products products = pick_products();
  const Blocks blocks(w, a.pool, a.filters);
  const Index panels = products.count_panels(a.filters);
  const Index size = packed_size(a.filters, blocks.patch);
  call_scratch.reserve(size, 1);
  const Factor weights =
      packed(products, {a.weights, a.filters, 1}, a.filters, blocks.patch, call_scratch.take(size));
  const Index outputs = a.images * w.out_h * w.out_w;
  in_parts(a.images * w.out_h / blocks.unit, outputs * size, [&](Index begin, Index end) {
    const Index last = end * blocks.unit;
    part_scratch.reserve(blocks.step * blocks.row * (blocks.patch + blocks.filters), 2);
    float* cols = part_scratch.take(blocks.step * blocks.row * blocks.patch);
    float* z = part_scratch.take(blocks.step * blocks.row * blocks.filters);
    for (Index first = begin * blocks.unit; first < last; first += blocks.step) {
      const Index rows = std::min(blocks.step, last - first);
      const Index pixels = rows * blocks.row;
      const float* patches = a.x + first * blocks.row * blocks.patch;
      if (!blocks.pointwise) {
        im2col(a.x, cols, w, first, rows);
        patches = cols;
      }
      float* to = a.pool ? z : a.y + first * blocks.row * blocks.filters;
      products.multiply({patches, blocks.patch, 1}, weights, to, pixels, blocks.filters,
                        blocks.patch, false, 0, panels, product_scratch);
      if (!a.pool) {
        bias_relu(to, a.bias, pixels, blocks.filters, a.relu);
        continue;
      }
      const Index at = first / blocks.unit * a.pool->out_w * blocks.filters;
      max_pool(z, a.bias, a.y + at, a.codes + at, strip_of(*a.pool), rows / blocks.unit, a.relu);
    }
  });
}

void blocked_gradient(const BlockedGradient& a) {
  const Window& w = a.w;
  const Products products = pick_products();
  const Blocks blocks(w, a.pool, a.filters);
  const int parts = count_gradient_parts(a, blocks);
  // Parts that share an image add to copies of its gradient, which are summed at the end. A part
  // has rows of one or two images then.
  const bool shares = a.images < parts && a.x_gradient && !blocks.pointwise;
  const auto begin_of = [&](int part) {
    if (a.images >= parts) return begin_of_part(a.images, part, parts) * w.out_h;
    return begin_of_part(a.images * w.out_h / blocks.unit, part, parts) * blocks.unit;
  };
  const Index size = blocks.patch * blocks.filters;
  const Index packed_numbers = a.x_gradient ? packed_size(blocks.patch, blocks.filters) : 0;
  // The first part adds to the result itself.
  const Index more = a.weight_gradient ? (parts - 1) * size : 0;
  const Index copied = shares ? 2 * w.image() : 0;
  call_scratch.reserve(more + parts * (blocks.filters + copied) + packed_numbers, 4);
  float* copy = call_scratch.take(packed_numbers);
  const Factor weights = a.x_gradient ? packed(products, {a.weights, 1, blocks.filters},
                                               blocks.patch, blocks.filters, copy)
                                      : Factor{};
  float* sums = call_scratch.take(more);
  float* bias_sums = call_scratch.take(parts * blocks.filters);
  float* copies = call_scratch.take(parts * copied);
  std::fill(bias_sums, bias_sums + parts * blocks.filters, 0.0f);
  in_parallel(parts, [&](int part) {
    const Index last = begin_of(part + 1);
    Index first = begin_of(part);
    const Index first_image = first / w.out_h;
    float* part_images = shares ? copies + part * copied : a.x_gradient;
    const Index row_of_images = shares ? first_image * w.out_h : 0;
    float* part_sums = part == 0 ? a.weight_gradient : sums + (part - 1) * size;
    bool added = false;
    float* part_bias = a.bias_gradient ? bias_sums + part * blocks.filters : nullptr;
    part_scratch.reserve(blocks.step * blocks.row * (blocks.patch + blocks.filters), 2);
    float* cols = part_scratch.take(blocks.step * blocks.row * blocks.patch);
    float* masked = part_scratch.take(blocks.step * blocks.row * blocks.filters);
    if (shares) {
      std::fill(part_images, part_images + copied, 0.0f);
    } else if (a.x_gradient && !blocks.pointwise) {
      std::fill(a.x_gradient + first_image * w.image(), a.x_gradient + last / w.out_h * w.image(),
                0.0f);
    }
    for (; first < last; first += blocks.step) {
      const Index rows = std::min(blocks.step, last - first);
      const Index pixels = rows * blocks.row;
      const Index at = first * blocks.row * blocks.filters;
      const float* dz = masked;
      if (a.pool) {
        const Index from = first / blocks.unit * a.pool->out_w * blocks.filters;
        max_pool_gradient(a.g + from, a.codes + from, masked, part_bias, strip_of(*a.pool),
                          rows / blocks.unit);
      } else if (a.y) {
        relu_gradient(a.g + at, a.y + at, masked, part_bias, pixels, blocks.filters);
      } else {
        dz = a.g + at;
        if (part_bias) relu_gradient(dz, nullptr, nullptr, part_bias, pixels, blocks.filters);
      }
      if (a.weight_gradient) {
        const float* patches = a.x + first * blocks.row * blocks.patch;
        if (!blocks.pointwise) {
          im2col(a.x, cols, w, first, rows);
          patches = cols;
        }
        products.multiply({patches, 1, blocks.patch}, {dz, blocks.filters, 1}, part_sums,
                          blocks.patch, blocks.filters, pixels, added, 0,
                          products.count_panels(blocks.filters), product_scratch);
        added = true;
      }
      if (!a.x_gradient) continue;
      float* to = blocks.pointwise ? a.x_gradient + first * blocks.row * blocks.patch : cols;
      products.multiply({dz, blocks.filters, 1}, weights, to, pixels, blocks.patch, blocks.filters,
                        false, 0, products.count_panels(blocks.patch), product_scratch);
      if (!blocks.pointwise) col2im(cols, part_images, w, first - row_of_images, rows);
    }
    if (a.weight_gradient && !added) std::fill(part_sums, part_sums + size, 0.0f);
  });
  in_parts(shares ? a.images * w.image() : 0, [&](Index first, Index last) {
    std::fill(a.x_gradient + first, a.x_gradient + last, 0.0f);
    for (int part = 0; part < parts; ++part) {
      const Index start = begin_of(part) / w.out_h * w.image();
      const Index end = std::min({last, start + copied, a.images * w.image()});
      const float* from = copies + part * copied;
      for (Index i = std::max(first, start); i < end; ++i) a.x_gradient[i] += from[i - start];
    }
  });
  in_parts(more > 0 ? size : 0, [&](Index first, Index last) {
    for (const float* from = sums; from < sums + more; from += size) {
      for (Index i = first; i < last; ++i) a.weight_gradient[i] += from[i];
    }
  });
  for (int part = 1; part < parts; ++part) {
    for (Index f = 0; f < blocks.filters; ++f) bias_sums[f] += bias_sums[part * blocks.filters + f];
  }
  if (a.bias_gradient) std::copy(bias_sums, bias_sums + blocks.filters, a.bias_gradient);
}

}  // namespace pycollective::nn
