// One row of max pooling, for kernels that pool a convolution's output while it is in cache.
// Pooling windows are not dilated.
#pragma once

#include <cstring>
#include <type_traits>

#include "nn/kernels.h"

namespace pycollective::nn {

// While compared, codes are as wide as values, so that loops use vectors of one width.
template <typename T>
using Wide = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;

// Channels that are processed at once; the remaining ones are processed one by one. The compiler
// vectorizes the loops for these numbers. With 16, it does not vectorize the forward loop.
constexpr Index kChannelsForward = 32;
constexpr Index kChannelsBack = 16;

// Pools kCount channels of one window. `corner` is the window's first tap; `down` and `across` are
// the taps inside the image.
template <typename T, typename Code, bool kRelu, Index kCount>
PYCOLLECTIVE_INLINE void pool_channels(const T* __restrict corner, Index line,
                                       const T* __restrict bias, T* __restrict y,
                                       Code* __restrict codes, Index kernel_w, Index channels,
                                       TapRange down, TapRange across) {
  T best[kCount];
  Wide<T> taken[kCount];
  const T* __restrict first = corner + down.first * line + across.first * channels;
  for (Index c = 0; c < kCount; ++c) {
    best[c] = first[c] + (bias ? bias[c] : T{0});
    taken[c] = static_cast<Wide<T>>(down.first * kernel_w + across.first);
  }
  for (Index i = down.first; i < down.last; ++i) {
    for (Index j = across.first; j < across.last; ++j) {
      const T* __restrict tap = corner + i * line + j * channels;
      const Wide<T> number = static_cast<Wide<T>>(i * kernel_w + j);
      for (Index c = 0; c < kCount; ++c) {
        const T value = tap[c] + (bias ? bias[c] : T{0});
        // Not "value > best": a NaN becomes the maximum and stays it.
        const bool take = !(value <= best[c]) & (best[c] == best[c]);
        best[c] = take ? value : best[c];
        taken[c] = take ? number : taken[c];
      }
    }
  }
  for (Index c = 0; c < kCount; ++c) {
    codes[c] = static_cast<Code>(!kRelu || best[c] > 0 ? taken[c] : Wide<T>{-1});
    y[c] = kRelu && best[c] < 0 ? T{0} : best[c];
  }
}

template <typename T, typename Code, bool kRelu>
PYCOLLECTIVE_INLINE void pool_window(const T* corner, Index line, const T* bias, T* y, Code* codes,
                                     Index kernel_w, Index channels, TapRange down,
                                     TapRange across) {
  constexpr Index kCount = kChannelsForward;
  Index c = 0;
  for (; c + kCount <= channels; c += kCount) {
    pool_channels<T, Code, kRelu, kCount>(corner + c, line, bias ? bias + c : nullptr, y + c,
                                          codes + c, kernel_w, channels, down, across);
  }
  for (; c < channels; ++c) {
    pool_channels<T, Code, kRelu, 1>(corner + c, line, bias ? bias + c : nullptr, y + c, codes + c,
                                     kernel_w, channels, down, across);
  }
}

// Pools the windows of output row `row`. x is one image; y and codes are the row's results.
template <typename T, typename Code, bool kRelu>
PYCOLLECTIVE_INLINE void pool_row(const T* x, const T* bias, T* y, Code* codes, const Window& w,
                                  Index row) {
  const Index channels = w.channels;
  const Index line = w.width * channels;
  const Index top = row * w.stride_h - w.pad_top;
  const TapRange down = inside(top, 1, w.kernel_h, w.height);
  const bool two_by_two = w.kernel_h == 2 && w.kernel_w == 2 && down.last - down.first == 2;
  for (Index out = 0; out < w.out_w; ++out, y += channels, codes += channels) {
    const Index left = out * w.stride_w - w.pad_left;
    const TapRange across = inside(left, 1, w.kernel_w, w.width);
    const T* corner = x + top * line + left * channels;
    if (two_by_two && across.last - across.first == 2) {
      // Constant sizes, so that the compiler unrolls the loops over the taps.
      pool_window<T, Code, kRelu>(corner, line, bias, y, codes, 2, channels, {0, 2}, {0, 2});
    } else {
      pool_window<T, Code, kRelu>(corner, line, bias, y, codes, w.kernel_w, channels, down, across);
    }
  }
}

// In windows with more taps, gradients are written to the maxima alone.
constexpr Index kMostTaps = 16;

// The gradient of pool_channels. With kStore, writes every tap inside the image; else adds to it.
template <typename T, typename Code, bool kStore, Index kCount>
PYCOLLECTIVE_INLINE void unpool_channels(const T* __restrict g, const Code* __restrict codes,
                                         T* __restrict corner, Index line, Index kernel_w,
                                         Index channels, TapRange down, TapRange across) {
  Wide<T> taken[kCount];
  T gradient[kCount];
  for (Index c = 0; c < kCount; ++c) {
    taken[c] = static_cast<Wide<T>>(codes[c]);
    gradient[c] = g[c];
  }
  for (Index i = down.first; i < down.last; ++i) {
    for (Index j = across.first; j < across.last; ++j) {
      T* __restrict tap = corner + i * line + j * channels;
      const Wide<T> number = static_cast<Wide<T>>(i * kernel_w + j);
      for (Index c = 0; c < kCount; ++c) {
        const T part = taken[c] == number ? gradient[c] : T{0};
        tap[c] = kStore ? part : tap[c] + part;
      }
    }
  }
}

template <typename T, typename Code, bool kStore>
PYCOLLECTIVE_INLINE void unpool_window(const T* g, const Code* codes, T* corner, Index line,
                                       Index kernel_w, Index channels, TapRange down,
                                       TapRange across) {
  constexpr Index kCount = kChannelsBack;
  Index c = 0;
  for (; c + kCount <= channels; c += kCount) {
    unpool_channels<T, Code, kStore, kCount>(g + c, codes + c, corner + c, line, kernel_w, channels,
                                             down, across);
  }
  for (; c < channels; ++c) {
    unpool_channels<T, Code, kStore, 1>(g + c, codes + c, corner + c, line, kernel_w, channels,
                                        down, across);
  }
}

// Adds, by channel, the gradients of outputs that relu let pass.
template <typename T, typename Code>
PYCOLLECTIVE_INLINE void add_bias_gradient(const T* __restrict g, const Code* __restrict codes,
                                           T* __restrict sums, Index pixels, Index channels) {
  for (Index p = 0; p < pixels; ++p, g += channels, codes += channels) {
    for (Index c = 0; c < channels; ++c) {
      const Wide<T> code = static_cast<Wide<T>>(codes[c]);
      sums[c] += code != static_cast<Wide<T>>(kNone<Code>) ? g[c] : T{0};
    }
  }
}

// Writes or adds the gradients of output row `row` to the image dx, which the caller has cleared if
// necessary.
template <typename T, typename Code>
PYCOLLECTIVE_INLINE void unpool_row(const T* g, const Code* codes, T* dx, const Window& w,
                                    Index row) {
  const Index channels = w.channels;
  const Index line = w.width * channels;
  const Index top = row * w.stride_h - w.pad_top;
  const TapRange down = inside(top, 1, w.kernel_h, w.height);
  const bool store = w.disjoint();
  // With many taps, going to each maximum is less work than comparing every tap.
  const bool scatter = w.taps() > kMostTaps;
  const bool two_by_two =
      store && w.kernel_h == 2 && w.kernel_w == 2 && down.last - down.first == 2;
  for (Index out = 0; out < w.out_w; ++out, g += channels, codes += channels) {
    const Index left = out * w.stride_w - w.pad_left;
    const TapRange across = inside(left, 1, w.kernel_w, w.width);
    T* corner = dx + top * line + left * channels;
    if (scatter) {
      for (Index c = 0; c < channels; ++c) {
        if (codes[c] == kNone<Code>) continue;
        const Index i = codes[c] / w.kernel_w, j = codes[c] % w.kernel_w;
        corner[i * line + j * channels + c] += g[c];
      }
    } else if (two_by_two && across.last - across.first == 2) {
      unpool_window<T, Code, true>(g, codes, corner, line, 2, channels, {0, 2}, {0, 2});
    } else if (store) {
      unpool_window<T, Code, true>(g, codes, corner, line, w.kernel_w, channels, down, across);
    } else {
      unpool_window<T, Code, false>(g, codes, corner, line, w.kernel_w, channels, down, across);
    }
  }
}

// Returns true if unpool_row writes every pixel of the image, so that the image need not be
// cleared.
inline bool covers(const Window& w) {
  return w.disjoint() && w.taps() <= kMostTaps && w.stride_h == w.kernel_h &&
         w.stride_w == w.kernel_w && w.out_h * w.stride_h - w.pad_top >= w.height &&
         w.out_w * w.stride_w - w.pad_left >= w.width;
}

}  // namespace pycollective::nn
