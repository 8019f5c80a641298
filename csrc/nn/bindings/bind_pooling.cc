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
    const auto from = reads<T>(x, "x", x.size());
    const auto b = reads<T>(bias, "bias", w.channels);
    const auto to = writes<T>(y, "y", size);
    with_code(codes, [&](auto code) {
      using Code = decltype(code);
      check_pool(w, nn::kNone<Code>);
      const auto tap = writes<Code>(codes, "codes", size);
      launch(false, [=, all = x.size()](const Places& at) {
        const T *pixels = at(from), *shift = at(b);
        T* results = at(to);
        Code* taps = at(tap);
        by_parts(all, [&](Index first, Index last) {
          const Index image = first / w.image(), skipped = image * (w.out_h * w.out_w * w.channels);
          nn::max_pool(pixels + image * w.image(), shift, results + skipped, taps + skipped, w,
                       last / w.image() - image, relu);
        });
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
    const auto from = reads<T>(g, "g", size);
    const auto to = writes<T>(dx, "dx", dx.size());
    const Operand<T> sums{out<T>(bias_gradient, "bias_gradient", w.channels)};
    with_code(codes, [&](auto code) {
      using Code = decltype(code);
      check_pool(w, nn::kNone<Code>);
      const auto tap = reads<Code>(codes, "codes", size);
      launch(false, [=, all = dx.size()](const Places& at) {
        const T* upstream = at(from);
        const Code* taps = at(tap);
        T *results = at(to), *totals = at(sums);
        const auto run = [&](Index first, Index last) {
          const Index image = first / w.image(), skipped = image * (w.out_h * w.out_w * w.channels);
          nn::max_pool_gradient(upstream + skipped, taps + skipped, results + image * w.image(),
                                totals, w, last / w.image() - image);
        };
        check_codes(taps, size, w);
        if (totals) {
          run(0, all);
        } else {
          by_parts(all, run);
        }
      });
    });
  });
}

void depthwise_forward(const Array& x, const MaybeArray& weights, const MaybeArray& bias, Array& y,
                       const Window& w) {
  const Index images = count(x, "x", w.image());
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const auto from = reads<T>(x, "x", x.size());
    const auto factors = reads<T>(weights, "weights", w.patch());
    const auto start = reads<T>(bias, "bias", w.channels);
    const auto to = writes<T>(y, "y", images * w.out_h * w.out_w * w.channels);
    launch(false, [=](const Places& at) {
      nn::depthwise_forward(at(from), at(factors), at(start), at(to), w, images);
    });
  });
}

void depthwise_gradient(const Array& g, const MaybeArray& weights, Array& dx, const Window& w) {
  const Index images = count(dx, "dx", w.image());
  with_real(g, "g", [&](auto zero) {
    using T = decltype(zero);
    const auto from = reads<T>(g, "g", images * w.out_h * w.out_w * w.channels);
    const auto factors = reads<T>(weights, "weights", w.patch());
    const auto to = writes<T>(dx, "dx", dx.size());
    launch(false, [=](const Places& at) {
      nn::depthwise_gradient(at(from), at(factors), at(to), w, images);
    });
  });
}

void depthwise_weight_gradient(const Array& x, const Array& g, Array& weight_gradient,
                               const Window& w) {
  const Index images = count(x, "x", w.image());
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const auto from = reads<T>(x, "x", x.size());
    const auto upstream = reads<T>(g, "g", images * w.out_h * w.out_w * w.channels);
    const auto to = writes<T>(weight_gradient, "weight_gradient", w.patch());
    launch(false, [=](const Places& at) {
      nn::depthwise_weight_gradient(at(from), at(upstream), at(to), w, images);
    });
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
