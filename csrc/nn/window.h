// The geometry of a window that slides over the rows and columns of an image [height, width,
// channels]: a convolution's kernel or a pooling window. The number of images is not part of it.
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
  bool operator==(const Window&) const = default;
};

// Rules of TensorFlow for "VALID" and "SAME". Throws std::invalid_argument where a size is not
// positive or, without padding, the kernel does not fit into the image.
Window make_window(Index height, Index width, Index channels, Index kernel_h, Index kernel_w,
                   Index stride_h, Index stride_w, Index dilation_h, Index dilation_w, bool same);

// The part [first, last) of the taps of a window at `start` that lies inside [0, size).
struct TapRange {
  Index first, last;
};

inline TapRange inside(Index start, Index dilation, Index taps, Index size) {
  const Index first = start < 0 ? (-start + dilation - 1) / dilation : 0;
  const Index room = size - start;  // taps k with k * dilation < room are left of the end
  const Index last = room <= 0 ? 0 : (room + dilation - 1) / dilation;
  return {first < taps ? first : taps, last < taps ? last : taps};
}

}  // namespace pycollective::nn
