// The geometry of a window that slides over the rows and columns of an image [height, width,
// channels]: a convolution's kernel or a pooling window. Independent of the number of images.
#pragma once

#include <cstdint>

namespace pycollective::nn {

using Index = std::int64_t;

struct Window {
  Index height, width, channels;
  Index kernel_h, kernel_w;
  Index stride_h, stride_w;
  Index dilation_h, dilation_w;
  Index pad_top, pad_left;
  Index out_h, out_w;

  Index taps() const { return kernel_h * kernel_w; }
  Index patch() const { return taps() * channels; }
  Index image() const { return height * width * channels; }
  // True if every pixel is in at most one window, so that gradients need no sum.
  bool disjoint() const {
    return stride_h > (kernel_h - 1) * dilation_h && stride_w > (kernel_w - 1) * dilation_w;
  }
  bool operator==(const Window&) const = default;
};

// Applies TensorFlow's rules for "VALID" and "SAME" (`same`). Throws std::invalid_argument if a
// size is below 1 or above 2**31, or if a window without padding is larger than the image.
Window make_window(Index height, Index width, Index channels, Index kernel_h, Index kernel_w,
                   Index stride_h, Index stride_w, Index dilation_h, Index dilation_w, bool same);

// The taps [first, last) of a window at `start` that lie inside [0, size).
struct TapRange {
  Index first, last;
};

inline TapRange inside(Index start, Index dilation, Index taps, Index size) {
  const Index first = start < 0 ? (-start + dilation - 1) / dilation : 0;
  const Index rest = size - start;  // taps k with k * dilation < rest lie before the end
  const Index last = rest <= 0 ? 0 : (rest + dilation - 1) / dilation;
  return {first < taps ? first : taps, last < taps ? last : taps};
}

}  // namespace pycollective::nn
