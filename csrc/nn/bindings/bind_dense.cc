// Dense layers.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "nn/bindings/arguments.h"
#include "nn/bindings/bindings.h"
#include "nn/bindings/parts.h"
#include "nn/kernels.h"

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
  const auto from = reads<float>(x, "x", x.size());
  const auto factors = reads<float>(weights, "weights", weights.size());
  const auto shift = reads<float>(bias, "bias", s.units);
  const auto to = writes<float>(y, "y", area(s.rows, s.units));
  launch(brief(s), [=](const Places& at) {
    nn::dense_forward(at(from), at(factors), at(shift), at(to), s.rows, s.inputs, s.units, relu);
  });
}

void dense_gradient(const Array& x, const Array& weights, const Array& g, const MaybeArray& y,
                    MaybeArray x_gradient, MaybeArray weight_gradient, MaybeArray bias_gradient) {
  const DenseSizes s = check_dense(x, weights);
  const Index size = area(s.rows, s.units);
  const auto from = reads<float>(x, "x", x.size());
  const auto factors = reads<float>(weights, "weights", weights.size());
  const auto upstream = reads<float>(g, "g", size);
  const auto result = reads<float>(y, "y", size);
  const auto dx = writes<float>(x_gradient, "x_gradient", x.size());
  const auto dw = writes<float>(weight_gradient, "weight_gradient", weights.size());
  const auto db = writes<float>(bias_gradient, "bias_gradient", s.units);
  launch(brief(s), [=](const Places& at) {
    nn::dense_gradient({at(from), at(factors), at(upstream), at(result), at(dx), at(dw), at(db),
                        s.rows, s.inputs, s.units});
  });
}

}  // namespace

void bind_dense(py::module_& m) {
  m.def("dense_forward", &dense_forward, "x"_a, "weights"_a, "bias"_a, "y"_a, "relu"_a);
  m.def("dense_gradient", &dense_gradient, "x"_a, "weights"_a, "g"_a, "y"_a, "x_gradient"_a,
        "weight_gradient"_a, "bias_gradient"_a);
}

}  // namespace pycollective
