// Dense layers.
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

struct DenseSizes {
  Index rows, inputs, units;
};

DenseSizes check_dense(const Array& x, const Array& weights) {
  if (x.ndim() != 2 || weights.ndim() != 2 || x.shape(1) != weights.shape(0)) {
    throw py::value_error("x of shape " + shape_text(x) + " does not fit weights of shape " +
                          shape_text(weights));
  }
  return {x.shape(0), x.shape(1), weights.shape(1)};
}

bool brief(const DenseSizes& s) { return area(area(s.rows, s.inputs), s.units) <= kBrief; }

void dense_forward(const Array& x, const Array& weights, const MaybeArray& bias, Array& y,
                   bool relu) {
  const DenseSizes s = check_dense(x, weights);
  const float* from = in<float>(x, "x", x.size());
  const float* factors = in<float>(weights, "weights", weights.size());
  const float* shift = in<float>(bias, "bias", s.units);
  float* to = out<float>(y, "y", area(s.rows, s.units));
  InterpreterRelease release(brief(s));
  nn::dense_forward(from, factors, shift, to, s.rows, s.inputs, s.units, relu);
}

void dense_gradient(const Array& x, const Array& weights, const Array& g, const MaybeArray& y,
                    MaybeArray x_gradient, MaybeArray weight_gradient, MaybeArray bias_gradient) {
  const DenseSizes s = check_dense(x, weights);
  const Index size = area(s.rows, s.units);
  const nn::DenseGradient a{in<float>(x, "x", x.size()),
                            in<float>(weights, "weights", weights.size()),
                            in<float>(g, "g", size),
                            in<float>(y, "y", size),
                            out<float>(x_gradient, "x_gradient", x.size()),
                            out<float>(weight_gradient, "weight_gradient", weights.size()),
                            out<float>(bias_gradient, "bias_gradient", s.units),
                            s.rows,
                            s.inputs,
                            s.units};
  InterpreterRelease release(brief(s));
  nn::dense_gradient(a);
}

}  // namespace

void bind_dense(py::module_& m) {
  m.def("dense_forward", &dense_forward, "x"_a, "weights"_a, "bias"_a, "y"_a, "relu"_a);
  m.def("dense_gradient", &dense_gradient, "x"_a, "weights"_a, "g"_a, "y"_a, "x_gradient"_a,
        "weight_gradient"_a, "bias_gradient"_a);
}

}  // namespace pycollective
