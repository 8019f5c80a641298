#include "nn/window.h"

#include <stdexcept>
#include <string>

namespace pycollective::nn {
namespace {

// A window's number of positions along an axis, and the padding before the first element.
struct Positions {
  Index count, pad;
};

Positions positions(const char* axis, Index size, Index kernel, Index stride, Index dilation,
                    bool same) {
  if (size < 1 || kernel < 1 || stride < 1 || dilation < 1) {
    throw std::invalid_argument(std::string(axis) + ": input size " + std::to_string(size) +
                                ", window " + std::to_string(kernel) + ", stride " +
                                std::to_string(stride) + " and dilation " +
                                std::to_string(dilation) + " must all be at least 1");
  }
  // The limit, and the form of these comparisons, avoid overflows.
  constexpr Index kLimit = Index{1} << 31;
  if (size > kLimit || kernel > kLimit || stride > kLimit || dilation > kLimit / kernel) {
    throw std::invalid_argument(std::string(axis) + ": input size " + std::to_string(size) +
                                ", stride " + std::to_string(stride) + " and window " +
                                std::to_string(kernel) + " times dilation " +
                                std::to_string(dilation) + " must all be at most 2**31");
  }
  const Index extent = (kernel - 1) * dilation + 1;
  if (same) {
    const Index out = (size + stride - 1) / stride;
    const Index missing = (out - 1) * stride + extent - size;
    return {out, missing > 0 ? missing / 2 : 0};
  }
  if (extent > size) {
    throw std::invalid_argument(std::string(axis) + ": a window of " + std::to_string(kernel) +
                                " with dilation " + std::to_string(dilation) +
                                " is larger than the input, " + std::to_string(size) +
                                "; use padding=\"SAME\" or a smaller window");
  }
  return {(size - extent) / stride + 1, 0};
}

}  // namespace

Window make_window(Index height, Index width, Index channels, Index kernel_h, Index kernel_w,
                   Index stride_h, Index stride_w, Index dilation_h, Index dilation_w, bool same) {
  if (channels < 1) {
    throw std::invalid_argument("channels must be at least 1, got " + std::to_string(channels));
  }
  const Positions rows = positions("height", height, kernel_h, stride_h, dilation_h, same);
  const Positions cols = positions("width", width, kernel_w, stride_w, dilation_w, same);
  Index image, filter;
  if (__builtin_mul_overflow(height, width, &image) ||
      __builtin_mul_overflow(image, channels, &image) ||
      __builtin_mul_overflow(kernel_h, kernel_w, &filter) ||
      __builtin_mul_overflow(filter, channels, &filter)) {
    throw std::invalid_argument("an image or a window has too many numbers");
  }
  return {height,     width,      channels, kernel_h, kernel_w,   stride_h,  stride_w,
          dilation_h, dilation_w, rows.pad, cols.pad, rows.count, cols.count};
}

}  // namespace pycollective::nn
