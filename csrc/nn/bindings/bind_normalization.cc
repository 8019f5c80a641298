// Batch normalization.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "nn/bindings/arguments.h"
#include "nn/bindings/bindings.h"
#include "nn/kernels.h"
#include "support/interpreter_release.h"

namespace pycollective {
namespace {

namespace py = pybind11;
using namespace pybind11::literals;

// Returns the number of rows of an array with this number of channels.
Index rows_of(const Array& a, const char* name, Index channels) {
  if (channels < 1) throw py::value_error("there must be at least one channel");
  return count(a, name, channels);
}

void batch_moments(const Array& x, Array& mean, Array& variance) {
  const Index channels = mean.size(), rows = rows_of(x, "x", channels);
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(x, "x", x.size());
    T* means = out<T>(mean, "mean", channels);
    T* variances = out<T>(variance, "variance", channels);
    InterpreterRelease release;
    nn::batch_moments(from, means, variances, rows, channels);
  });
}

void batch_scale(const Array& x, const Array& mean, const Array& factor, const Array& shift,
                 Array& y, bool relu) {
  const Index channels = factor.size(), rows = rows_of(x, "x", channels);
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(x, "x", x.size());
    const T* means = in<T>(mean, "mean", channels);
    const T* factors = in<T>(factor, "factor", channels);
    const T* shifts = in<T>(shift, "shift", channels);
    T* to = out<T>(y, "y", x.size());
    InterpreterRelease release;
    nn::batch_scale(from, means, factors, shifts, to, rows, channels, relu);
  });
}

// Requires both or neither. With both, the kernels compute again where relu passed the result, and
// mask the gradient.
void check_cut(const MaybeArray& factor, const MaybeArray& bias) {
  if (factor.has_value() != bias.has_value()) {
    throw py::value_error("factor and bias of the result that relu cuts off go together");
  }
}

void batch_sums(const Array& g, const Array& x, const Array& mean, Array& sums, Array& products,
                const MaybeArray& factor, const MaybeArray& bias) {
  check_cut(factor, bias);
  const Index channels = mean.size(), rows = rows_of(x, "x", channels);
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* gradient = in<T>(g, "g", x.size());
    const T* from = in<T>(x, "x", x.size());
    const T* means = in<T>(mean, "mean", channels);
    T* first = out<T>(sums, "sums", channels);
    T* second = out<T>(products, "products", channels);
    const T* factors = in<T>(factor, "factor", channels);
    const T* biases = in<T>(bias, "bias", channels);
    InterpreterRelease release;
    nn::batch_sums(gradient, from, means, factors, biases, first, second, rows, channels);
  });
}

void batch_combine(const Array& g, const Array& x, const Array& mean, const Array& by_g,
                   const Array& by_x, const Array& shift, Array& dx, const MaybeArray& factor,
                   const MaybeArray& bias) {
  check_cut(factor, bias);
  const Index channels = by_g.size(), rows = rows_of(x, "x", channels);
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* gradient = in<T>(g, "g", x.size());
    const T* from = in<T>(x, "x", x.size());
    const T* means = in<T>(mean, "mean", channels);
    const T* gs = in<T>(by_g, "by_g", channels);
    const T* xs = in<T>(by_x, "by_x", channels);
    const T* shifts = in<T>(shift, "shift", channels);
    T* to = out<T>(dx, "dx", x.size());
    const T* factors = in<T>(factor, "factor", channels);
    const T* biases = in<T>(bias, "bias", channels);
    InterpreterRelease release;
    nn::batch_combine(gradient, from, means, gs, xs, shifts, factors, biases, to, rows, channels);
  });
}

}  // namespace

void bind_normalization(py::module_& m) {
  m.def("batch_moments", &batch_moments, "x"_a, "mean"_a, "variance"_a);
  m.def("batch_scale", &batch_scale, "x"_a, "mean"_a, "factor"_a, "shift"_a, "y"_a,
        "relu"_a = false);
  m.def("batch_sums", &batch_sums, "g"_a, "x"_a, "mean"_a, "sums"_a, "products"_a,
        "factor"_a = py::none(), "bias"_a = py::none());
  m.def("batch_combine", &batch_combine, "g"_a, "x"_a, "mean"_a, "by_g"_a, "by_x"_a, "shift"_a,
        "dx"_a, "factor"_a = py::none(), "bias"_a = py::none());
}

}  // namespace pycollective
