#include "nn/pool.h"

#include "support/simd.h"

namespace pycollective::nn {
namespace {

template <typename T, typename Code>
PYCOLLECTIVE_INLINE void max_pool_body(const T* x, const T* bias, T* y, Code* codes,
                                       const Window& w, Index images, bool relu) {
  const Index row_out = w.out_w * w.channels;
  for (Index n = 0; n < images; ++n, x += w.image()) {
    for (Index row = 0; row < w.out_h; ++row, y += row_out, codes += row_out) {
      if (relu) {
        pool_row<T, Code, true>(x, bias, y, codes, w, row);
      } else {
        pool_row<T, Code, false>(x, bias, y, codes, w, row);
      }
    }
  }
}

template <typename T, typename Code>
PYCOLLECTIVE_INLINE void max_pool_gradient_body(const T* g, const Code* codes, T* dx,
                                                T* bias_gradient, const Window& w, Index images) {
  const Index row_out = w.out_w * w.channels;
  const bool clear = !covers(w);
  if (bias_gradient) {
    add_bias_gradient(g, codes, bias_gradient, images * w.out_h * w.out_w, w.channels);
  }
  for (Index n = 0; n < images; ++n, dx += w.image()) {
    if (clear) std::memset(dx, 0, static_cast<std::size_t>(w.image()) * sizeof(T));
    for (Index row = 0; row < w.out_h; ++row, g += row_out, codes += row_out) {
      unpool_row(g, codes, dx, w, row);
    }
  }
}

template <typename Code>
PYCOLLECTIVE_INLINE bool codes_fit_body(const Code* codes, Index size, Code taps) {
  Code wrong = 0;
  for (Index i = 0; i < size; ++i) {
    wrong |= static_cast<Code>((codes[i] >= taps) & (codes[i] != kNone<Code>));
  }
  return wrong == 0;
}

}  // namespace

PYCOLLECTIVE_CLONES bool codes_fit(const std::uint8_t* codes, Index size, std::uint8_t taps) {
  return codes_fit_body(codes, size, taps);
}
PYCOLLECTIVE_CLONES bool codes_fit(const std::uint32_t* codes, Index size, std::uint32_t taps) {
  return codes_fit_body(codes, size, taps);
}

#define PYCOLLECTIVE_POOL(T, Code)                                                                 \
  PYCOLLECTIVE_CLONES void max_pool(const T* x, const T* bias, T* y, Code* codes, const Window& w, \
                                    Index images, bool relu) {                                     \
    max_pool_body(x, bias, y, codes, w, images, relu);                                             \
  }                                                                                                \
  PYCOLLECTIVE_CLONES void max_pool_gradient(const T* g, const Code* codes, T* dx,                 \
                                             T* bias_gradient, const Window& w, Index images) {    \
    max_pool_gradient_body(g, codes, dx, bias_gradient, w, images);                                \
  }

PYCOLLECTIVE_POOL(float, std::uint8_t)
PYCOLLECTIVE_POOL(double, std::uint8_t)
PYCOLLECTIVE_POOL(float, std::uint32_t)
PYCOLLECTIVE_POOL(double, std::uint32_t)

}  // namespace pycollective::nn
