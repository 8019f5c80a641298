// Bias, relu, sums of arrays, and the cross-entropy.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>

#include "nn/bindings/arguments.h"
#include "nn/bindings/bindings.h"
#include "nn/bindings/parts.h"
#include "nn/kernels.h"
#include "support/interpreter_release.h"

namespace pycollective {
namespace {

namespace py = pybind11;
using namespace pybind11::literals;

void bias_relu(Array& z, const MaybeArray& bias, bool relu) {
  with_real(z, "z", [&](auto zero) {
    using T = decltype(zero);
    const Index channels = bias ? std::max<Index>(bias->size(), 1) : 1;
    const Index rows = count(z, "z", channels);
    T* to = out<T>(z, "z", z.size());
    const T* b = in<T>(bias, "bias", channels);
    InterpreterRelease release;
    nn::bias_relu(to, b, rows, channels, relu);
  });
}

double sum_of_squares(const Array& x) {
  double result = 0;
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(x, "x", x.size());
    InterpreterRelease release(x.size() <= kBrief);
    result = nn::sum_of_squares(from, x.size());
  });
  return result;
}

void add_multiple(const Array& x, double factor, const Array& y, Array& z) {
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* multiplied = in<T>(x, "x", x.size());
    const T* added = in<T>(y, "y", x.size());
    T* to = out<T>(z, "z", x.size());
    InterpreterRelease release(x.size() <= kBrief);
    by_parts(x.size(), [&](Index first, Index last) {
      nn::add_multiple(multiplied + first, factor, added + first, to + first, last - first);
    });
  });
}

void relu(const Array& x, Array& y) {
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(x, "x", x.size());
    T* to = out<T>(y, "y", x.size());
    InterpreterRelease release;
    by_parts(x.size(),
             [&](Index first, Index last) { nn::relu(from + first, to + first, last - first); });
  });
}

void add_relu(const Array& x, const Array& y, Array& z) {
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* one = in<T>(x, "x", x.size());
    const T* other = in<T>(y, "y", x.size());
    T* to = out<T>(z, "z", x.size());
    InterpreterRelease release;
    by_parts(x.size(), [&](Index first, Index last) {
      nn::add_relu(one + first, other + first, to + first, last - first);
    });
  });
}

void relu_gradient(const Array& g, const MaybeArray& y, MaybeArray dz, MaybeArray bias_gradient) {
  with_real(g, "g", [&](auto zero) {
    using T = decltype(zero);
    const Index channels = bias_gradient ? std::max<Index>(bias_gradient->size(), 1) : 1;
    const Index rows = count(g, "g", channels);
    const T* from = in<T>(g, "g", g.size());
    const T* mask = in<T>(y, "y", g.size());
    T* to = out<T>(dz, "dz", g.size());
    T* sums = out<T>(bias_gradient, "bias_gradient", channels);
    InterpreterRelease release;
    if (sums || !to) {
      nn::relu_gradient(from, mask, to, sums, rows, channels);
      return;
    }
    by_parts(g.size(), [&](Index first, Index last) {
      nn::relu_gradient(from + first, mask ? mask + first : nullptr, to + first,
                        static_cast<T*>(nullptr), last - first, 1);
    });
  });
}

template <typename T>
const nn::Activation<T>& activation_of(const std::string& name) {
  const nn::Activation<T>* found = nn::find_activation<T>(name);
  if (!found) throw py::value_error("unknown activation '" + name + "'");
  return *found;
}

void activation(const std::string& name, const Array& x, Array& y, double alpha) {
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const nn::Activation<T>& kind = activation_of<T>(name);
    const T* from = in<T>(x, "x", x.size());
    T* to = out<T>(y, "y", x.size());
    InterpreterRelease release(x.size() <= kBrief / 16);
    by_parts(x.size(), [&](Index first, Index last) {
      kind.values(from + first, T(alpha), to + first, last - first);
    });
  });
}

void activation_gradient(const std::string& name, const Array& g, const Array& x, Array& dx,
                         double alpha) {
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const nn::Activation<T>& kind = activation_of<T>(name);
    const T* upstream = in<T>(g, "g", x.size());
    const T* from = in<T>(x, "x", x.size());
    T* to = out<T>(dx, "dx", x.size());
    InterpreterRelease release(x.size() <= kBrief / 16);
    by_parts(x.size(), [&](Index first, Index last) {
      kind.gradients(upstream + first, from + first, T(alpha), to + first, last - first);
    });
  });
}

// Checks [rows, classes], and calls body(first, last) for parts of the rows.
template <typename Body>
void by_class_rows(const Array& x, const Body& body) {
  if (x.ndim() != 2 || x.shape(1) < 1) {
    throw py::value_error("logits must be [rows, classes], not " + shape_text(x));
  }
  const Index classes = x.shape(1);
  InterpreterRelease release(x.size() <= kBrief / 16);
  by_parts(x.size(), [&](Index first, Index last) { body(first / classes, last / classes); });
}

void softmax(const Array& x, Array& y, bool logarithm) {
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(x, "x", x.size());
    T* to = out<T>(y, "y", x.size());
    by_class_rows(x, [&](Index first, Index last) {
      const Index classes = x.shape(1), at = first * classes;
      nn::softmax(from + at, to + at, last - first, classes, logarithm);
    });
  });
}

void softmax_gradient(const Array& g, const Array& y, Array& dx, bool logarithm) {
  with_real(y, "y", [&](auto zero) {
    using T = decltype(zero);
    const T* upstream = in<T>(g, "g", y.size());
    const T* from = in<T>(y, "y", y.size());
    T* to = out<T>(dx, "dx", y.size());
    by_class_rows(y, [&](Index first, Index last) {
      const Index classes = y.shape(1), at = first * classes;
      nn::softmax_gradient(upstream + at, from + at, to + at, last - first, classes, logarithm);
    });
  });
}

void softmax_cross_entropy(const Array& logits, const Array& labels, Array& losses,
                           MaybeArray gradient) {
  if (logits.ndim() != 2 || logits.shape(1) < 1) {
    throw py::value_error("logits must be [rows, classes], not " + shape_text(logits));
  }
  const Index rows = logits.shape(0), classes = logits.shape(1);
  const Index* label = in<Index>(labels, "labels", rows);
  for (Index r = 0; r < rows; ++r) {
    if (label[r] < 0 || label[r] >= classes) {
      throw py::value_error("labels must be in 0 to " + std::to_string(classes - 1) +
                            " for logits of shape " + shape_text(logits) + ", got " +
                            std::to_string(label[r]) + " in row " + std::to_string(r));
    }
  }
  with_real(logits, "logits", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(logits, "logits", logits.size());
    T* loss = out<T>(losses, "losses", rows);
    T* slope = out<T>(gradient, "gradient", logits.size());
    InterpreterRelease release(logits.size() <= kBrief / 16);
    nn::softmax_cross_entropy(from, label, loss, slope, rows, classes);
  });
}

}  // namespace

void bind_pointwise(py::module_& m) {
  m.def("bias_relu", &bias_relu, "z"_a, "bias"_a, "relu"_a);
  m.def("sum_of_squares", &sum_of_squares, "x"_a);
  m.def("add_multiple", &add_multiple, "x"_a, "factor"_a, "y"_a, "z"_a);
  m.def("relu", &relu, "x"_a, "y"_a);
  m.def("add_relu", &add_relu, "x"_a, "y"_a, "z"_a);
  m.def("relu_gradient", &relu_gradient, "g"_a, "y"_a, "dz"_a, "bias_gradient"_a);
  m.def("activation", &activation, "name"_a, "x"_a, "y"_a, "alpha"_a = 1.0);
  m.def("activation_gradient", &activation_gradient, "name"_a, "g"_a, "x"_a, "dx"_a,
        "alpha"_a = 1.0);
  m.def("softmax", &softmax, "x"_a, "y"_a, "logarithm"_a);
  m.def("softmax_gradient", &softmax_gradient, "g"_a, "y"_a, "dx"_a, "logarithm"_a);
  m.def("softmax_cross_entropy", &softmax_cross_entropy, "logits"_a, "labels"_a, "losses"_a,
        "gradient"_a);
}

}  // namespace pycollective
