// Pooling, resampling and depthwise convolution.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "nn/bindings/arguments.h"
#include "nn/bindings/bindings.h"
#include "nn/bindings/parts.h"
#include "nn/kernels.h"
#include "support/interpreter_release.h"

namespace pycollective {
namespace {

namespace py = pybind11;
using namespace pybind11::literals;

template <typename Body>
void with_code(const Array& a, Body body) {
  if (py::isinstance<py::array_t<std::uint8_t>>(a)) {
    body(std::uint8_t{});
  } else {
    body(std::uint32_t{});
  }
}

void max_pool(const Array& x, const MaybeArray& bias, Array& y, Array& codes, const Window& w,
              bool relu) {
  const Index images = count(x, "x", w.image());
  const Index size = images * w.out_h * w.out_w * w.channels;
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(x, "x", x.size());
    const T* b = in<T>(bias, "bias", w.channels);
    T* to = out<T>(y, "y", size);
    with_code(codes, [&](auto code) {
      using Code = decltype(code);
      check_pool(w, nn::kNone<Code>);
      Code* tap = out<Code>(codes, "codes", size);
      InterpreterRelease release;
      by_parts(x.size(), [&](Index first, Index last) {
        const Index image = first / w.image(), at = image * (w.out_h * w.out_w * w.channels);
        nn::max_pool(from + image * w.image(), b, to + at, tap + at, w, last / w.image() - image,
                     relu);
      });
    });
  });
}

void max_pool_gradient(const Array& g, const Array& codes, Array& dx, MaybeArray bias_gradient,
                       const Window& w) {
  const Index images = count(dx, "dx", w.image());
  const Index size = images * w.out_h * w.out_w * w.channels;
  with_real(g, "g", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(g, "g", size);
    T* to = out<T>(dx, "dx", dx.size());
    T* sums = out<T>(bias_gradient, "bias_gradient", w.channels);
    with_code(codes, [&](auto code) {
      using Code = decltype(code);
      check_pool(w, nn::kNone<Code>);
      const Code* tap = in<Code>(codes, "codes", size);
      const auto run = [&](Index first, Index last) {
        const Index image = first / w.image(), at = image * (w.out_h * w.out_w * w.channels);
        nn::max_pool_gradient(from + at, tap + at, to + image * w.image(), sums, w,
                              last / w.image() - image);
      };
      InterpreterRelease release;
      check_codes(tap, size, w);
      if (sums) {
        run(0, dx.size());
      } else {
        by_parts(dx.size(), run);
      }
    });
  });
}

void depthwise_forward(const Array& x, const MaybeArray& weights, const MaybeArray& bias, Array& y,
                       const Window& w) {
  const Index images = count(x, "x", w.image());
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(x, "x", x.size());
    const T* factors = in<T>(weights, "weights", w.patch());
    const T* start = in<T>(bias, "bias", w.channels);
    T* to = out<T>(y, "y", images * w.out_h * w.out_w * w.channels);
    InterpreterRelease release;
    nn::depthwise_forward(from, factors, start, to, w, images);
  });
}

void depthwise_gradient(const Array& g, const MaybeArray& weights, Array& dx, const Window& w) {
  const Index images = count(dx, "dx", w.image());
  with_real(g, "g", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(g, "g", images * w.out_h * w.out_w * w.channels);
    const T* factors = in<T>(weights, "weights", w.patch());
    T* to = out<T>(dx, "dx", dx.size());
    InterpreterRelease release;
    nn::depthwise_gradient(from, factors, to, w, images);
  });
}

void depthwise_weight_gradient(const Array& x, const Array& g, Array& weight_gradient,
                               const Window& w) {
  const Index images = count(x, "x", w.image());
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(x, "x", x.size());
    const T* upstream = in<T>(g, "g", images * w.out_h * w.out_w * w.channels);
    T* to = out<T>(weight_gradient, "weight_gradient", w.patch());
    InterpreterRelease release;
    nn::depthwise_weight_gradient(from, upstream, to, w, images);
  });
}

void resample(const Array& x, const Array& down, const Array& across, Array& y) {
  if (x.ndim() != 4 || y.ndim() != 4 || x.shape(0) != y.shape(0) || x.shape(3) != y.shape(3)) {
    throw py::value_error("x of shape " + shape_text(x) + " and y of shape " + shape_text(y) +
                          " must be images, equal in number and channels");
  }
  const nn::Resampling r = {x.shape(0), x.shape(1), x.shape(2), y.shape(1), y.shape(2), x.shape(3)};
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(x, "x", x.size());
    const T* by_row = in<T>(down, "down", area(r.out_h, r.height));
    const T* by_column = in<T>(across, "across", area(r.out_w, r.width));
    T* to = out<T>(y, "y", y.size());
    InterpreterRelease release;
    nn::resample(from, by_row, by_column, to, r);
  });
}

}  // namespace

void bind_pooling(py::module_& m) {
  m.def("max_pool", &max_pool, "x"_a, "bias"_a, "y"_a, "codes"_a, "window"_a, "relu"_a);
  m.def("max_pool_gradient", &max_pool_gradient, "g"_a, "codes"_a, "dx"_a, "bias_gradient"_a,
        "window"_a);
  m.def("resample", &resample, "x"_a, "down"_a, "across"_a, "y"_a);
  m.def("depthwise_forward", &depthwise_forward, "x"_a, "weights"_a, "bias"_a, "y"_a, "window"_a);
  m.def("depthwise_gradient", &depthwise_gradient, "g"_a, "weights"_a, "dx"_a, "window"_a);
  m.def("depthwise_weight_gradient", &depthwise_weight_gradient, "x"_a, "g"_a, "weight_gradient"_a,
        "window"_a);
}

}  // namespace pycollective
