// Convolution: patches, and the kernels that work without patches.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>

#include "nn/bindings/arguments.h"
#include "nn/bindings/bindings.h"
#include "nn/kernels.h"
#include "support/interpreter_release.h"

namespace pycollective {
namespace {

namespace py = pybind11;
using namespace pybind11::literals;

// Checks that pooling windows lie over the convolution's output, without padding or overlap.
void check_fused(const Window& w, const Window& pool, Index filters) {
  check_pool(pool, nn::kNone<std::uint8_t>);
  if (pool.height != w.out_h || pool.width != w.out_w || pool.channels != filters ||
      pool.pad_top != 0 || pool.pad_left != 0 || pool.stride_h < pool.kernel_h ||
      pool.stride_w < pool.kernel_w || (pool.out_h - 1) * pool.stride_h + pool.kernel_h > w.out_h ||
      (pool.out_w - 1) * pool.stride_w + pool.kernel_w > w.out_w) {
    throw py::value_error(
        "a fused pooling window must lie over the convolution's output without padding or overlap");
  }
}

Index check_rows(const Array& x, const Window& w, Index first, Index rows) {
  const Index images = count(x, "x", w.image());
  if (first < 0 || rows < 0 || rows > images * w.out_h - first) {
    throw py::value_error("rows " + std::to_string(first) + " to " + std::to_string(first + rows) +
                          " are not among the " + std::to_string(images * w.out_h) +
                          " output rows");
  }
  return images;
}

void im2col(const Array& x, Array& cols, const Window& w, Index first, Index rows) {
  check_rows(x, w, first, rows);
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(x, "x", x.size());
    T* to = out<T>(cols, "cols", area(rows * w.out_w, w.patch()));
    InterpreterRelease release;
    nn::im2col(from, to, w, first, rows);
  });
}

void col2im(const Array& cols, Array& x, const Window& w, Index first, Index rows) {
  check_rows(x, w, first, rows);
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(cols, "cols", area(rows * w.out_w, w.patch()));
    T* to = out<T>(x, "x", x.size());
    InterpreterRelease release;
    nn::col2im(from, to, w, first, rows);
  });
}

void check_3x3(const Window& w) {
  if (w.kernel_h != 3 || w.kernel_w != 3 || w.stride_h != 1 || w.stride_w != 1 ||
      w.dilation_h != 1 || w.dilation_w != 1) {
    throw py::value_error("the window must be 3 x 3 with stride and dilation 1");
  }
}

// Checks the arguments of a kernel for 3 x 3 filters, and calls it.
template <typename Kernel>
void forward_of(const Kernel& kernel, const Array& x, const Array& weights, const MaybeArray& bias,
                Array& y, MaybeArray& codes, const Window& w, const std::optional<Window>& pool,
                bool relu) {
  const Index images = count(x, "x", w.image());
  const Index filters = count(weights, "weights", w.patch());
  if (filters < 1) throw py::value_error("weights hold no filter");
  check_3x3(w);
  if (pool) {
    check_fused(w, *pool, filters);
    if (pool->kernel_h != 2 || pool->kernel_w != 2 || pool->stride_h != 2 || pool->stride_w != 2) {
      throw py::value_error("the pooling window must be 2 x 2 with stride 2");
    }
    if (!relu) throw py::value_error("a fused pooling window needs relu=True");
  }
  if (pool.has_value() != codes.has_value()) {
    throw py::value_error("codes and pool go together: give both or none");
  }
  const Index pixels = pool ? pool->out_h * pool->out_w : w.out_h * w.out_w;
  const Index size = area(images * pixels, filters);
  const auto from = reads<float>(x, "x", x.size());
  const auto factors = reads<float>(weights, "weights", weights.size());
  const auto shift = reads<float>(bias, "bias", filters);
  const auto to = writes<float>(y, "y", size);
  const auto tap = writes<std::uint8_t>(codes, "codes", size);
  launch(false, [=](const Places& at) {
    kernel({at(from), at(factors), at(shift), at(to), at(tap), w, pool ? &*pool : nullptr, images,
            filters, relu});
  });
}

void winograd_forward(const Array& x, const Array& weights, const MaybeArray& bias, Array& y,
                      MaybeArray codes, const Window& w, const std::optional<Window>& pool,
                      bool relu) {
  forward_of(nn::winograd_forward, x, weights, bias, y, codes, w, pool, relu);
}

void direct_forward(const Array& x, const Array& weights, const MaybeArray& bias, Array& y,
                    MaybeArray codes, const Window& w, const std::optional<Window>& pool,
                    bool relu) {
  if (!pool || (w.channels != 1 && w.channels != 3)) {
    throw py::value_error("the kernel is for images of one or three channels, with pooling");
  }
  forward_of(nn::direct_forward, x, weights, bias, y, codes, w, pool, relu);
}

void winograd_gradient(const Array& x, const Array& weights, const Array& g, const MaybeArray& y,
                       MaybeArray x_gradient, MaybeArray weight_gradient, MaybeArray bias_gradient,
                       const Window& w) {
  const Index images = count(x, "x", w.image());
  const Index filters = count(weights, "weights", w.patch());
  if (filters < 1) throw py::value_error("weights hold no filter");
  check_3x3(w);
  const Index size = area(images * w.out_h * w.out_w, filters);
  const auto from = reads<float>(x, "x", x.size());
  const auto factors = reads<float>(weights, "weights", weights.size());
  const auto upstream = reads<float>(g, "g", size);
  const auto result = reads<float>(y, "y", size);
  const auto dx = writes<float>(x_gradient, "x_gradient", x.size());
  const auto dw = writes<float>(weight_gradient, "weight_gradient", weights.size());
  const auto db = writes<float>(bias_gradient, "bias_gradient", filters);
  launch(false, [=](const Places& at) {
    nn::winograd_gradient({at(from), at(factors), at(upstream), at(result), at(dx), at(dw), at(db),
                           w, images, filters});
  });
}

void sparse_gradient(const Array& x, const Array& weights, const Array& g, const Array& codes,
                     MaybeArray x_gradient, MaybeArray weight_gradient, MaybeArray bias_gradient,
                     const Window& w, const Window& pool) {
  const Index images = count(x, "x", w.image());
  const Index filters = count(weights, "weights", w.patch());
  if (filters < 1) throw py::value_error("weights hold no filter");
  check_fused(w, pool, filters);
  if (!nn::sparse_fits(w, filters)) {
    throw py::value_error("images or weights are too large: their offsets must fit into 32 bits");
  }
  const Index size = area(images * pool.out_h * pool.out_w, filters);
  const auto from = reads<float>(x, "x", x.size());
  const auto factors = reads<float>(weights, "weights", weights.size());
  const auto upstream = reads<float>(g, "g", size);
  const auto tap = reads<std::uint8_t>(codes, "codes", size);
  const auto dx = writes<float>(x_gradient, "x_gradient", x.size());
  const auto dw = writes<float>(weight_gradient, "weight_gradient", weights.size());
  const auto db = writes<float>(bias_gradient, "bias_gradient", filters);
  launch(false, [=](const Places& at) {
    check_codes(at(tap), size, pool);
    nn::sparse_gradient({at(from), at(factors), at(upstream), at(tap), at(dx), at(dw), at(db), w,
                         pool, images, filters});
  });
}

// Checks that pooling windows lie directly below each other, so that they divide the rows into
// blocks.
void check_strips(const Window& w, const Window& pool, Index filters) {
  check_fused(w, pool, filters);
  if (pool.stride_h != pool.kernel_h || pool.out_h * pool.stride_h != w.out_h) {
    throw py::value_error("the pooling windows must cover the rows of the convolution's output");
  }
}

void blocked_forward(const Array& x, const Array& weights, const MaybeArray& bias, Array& y,
                     MaybeArray codes, const Window& w, const std::optional<Window>& pool,
                     bool relu) {
  const Index images = count(x, "x", w.image());
  const Index filters = count(weights, "weights", w.patch());
  if (filters < 1) throw py::value_error("weights hold no filter");
  if (pool) check_strips(w, *pool, filters);
  if (pool.has_value() != codes.has_value()) {
    throw py::value_error("codes and pool go together: give both or none");
  }
  const Index pixels = pool ? pool->out_h * pool->out_w : w.out_h * w.out_w;
  const Index size = area(images * pixels, filters);
  const auto from = reads<float>(x, "x", x.size());
  const auto factors = reads<float>(weights, "weights", weights.size());
  const auto shift = reads<float>(bias, "bias", filters);
  const auto to = writes<float>(y, "y", size);
  const auto tap = writes<std::uint8_t>(codes, "codes", size);
  launch(false, [=](const Places& at) {
    nn::blocked_forward({at(from), at(factors), at(shift), at(to), at(tap), w,
                         pool ? &*pool : nullptr, images, filters, relu});
  });
}

void blocked_gradient(const Array& x, const Array& weights, const Array& g, const MaybeArray& y,
                      const MaybeArray& codes, MaybeArray x_gradient, MaybeArray weight_gradient,
                      MaybeArray bias_gradient, const Window& w,
                      const std::optional<Window>& pool) {
  const Index images = count(x, "x", w.image());
  const Index filters = count(weights, "weights", w.patch());
  if (filters < 1) throw py::value_error("weights hold no filter");
  if (pool) check_strips(w, *pool, filters);
  if (pool.has_value() != codes.has_value()) {
    throw py::value_error("codes and pool go together: give both or none");
  }
  const Index pixels = pool ? pool->out_h * pool->out_w : w.out_h * w.out_w;
  const Index size = area(images * pixels, filters);
  const auto from = reads<float>(x, "x", x.size());
  const auto factors = reads<float>(weights, "weights", weights.size());
  const auto upstream = reads<float>(g, "g", size);
  const auto result = reads<float>(y, "y", size);
  const auto tap = reads<std::uint8_t>(codes, "codes", size);
  const auto dx = writes<float>(x_gradient, "x_gradient", x.size());
  const auto dw = writes<float>(weight_gradient, "weight_gradient", weights.size());
  const auto db = writes<float>(bias_gradient, "bias_gradient", filters);
  launch(false, [=](const Places& at) {
    if (pool) check_codes(at(tap), size, *pool);
    nn::blocked_gradient({at(from), at(factors), at(upstream), at(result), at(tap), at(dx), at(dw),
                          at(db), w, pool ? &*pool : nullptr, images, filters});
  });
}

}  // namespace

void bind_convolution(py::module_& m) {
  m.def("im2col", &im2col, "x"_a, "cols"_a, "window"_a, "first"_a, "rows"_a);
  m.def("col2im", &col2im, "cols"_a, "x"_a, "window"_a, "first"_a, "rows"_a);
  m.def("direct_forward", &direct_forward, "x"_a, "weights"_a, "bias"_a, "y"_a, "codes"_a,
        "window"_a, "pool"_a, "relu"_a);
  m.def("winograd_forward", &winograd_forward, "x"_a, "weights"_a, "bias"_a, "y"_a, "codes"_a,
        "window"_a, "pool"_a, "relu"_a);
  m.def("winograd_gradient", &winograd_gradient, "x"_a, "weights"_a, "g"_a, "y"_a, "x_gradient"_a,
        "weight_gradient"_a, "bias_gradient"_a, "window"_a);
  m.def("sparse_gradient", &sparse_gradient, "x"_a, "weights"_a, "g"_a, "codes"_a, "x_gradient"_a,
        "weight_gradient"_a, "bias_gradient"_a, "window"_a, "pool"_a);
  m.def("sparse_fits", &nn::sparse_fits, "window"_a, "filters"_a,
        "Return True if offsets in such images and weights fit into 32 bits (sparse_gradient).");
  m.def("blocked_forward", &blocked_forward, "x"_a, "weights"_a, "bias"_a, "y"_a, "codes"_a,
        "window"_a, "pool"_a, "relu"_a);
  m.def("blocked_gradient", &blocked_gradient, "x"_a, "weights"_a, "g"_a, "y"_a, "codes"_a,
        "x_gradient"_a, "weight_gradient"_a, "bias_gradient"_a, "window"_a, "pool"_a);
}

}  // namespace pycollective
