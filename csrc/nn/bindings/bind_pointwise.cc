// Bias, activations, operations of two arrays, reductions, copies, softmax and losses.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

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
    nn::relu_gradient(from, mask, to, sums, rows, channels);
  });
}

template <typename T>
const nn::Activation<T>& activation_of(const std::string& name) {
  const nn::Activation<T>* found = nn::find_activation<T>(name);
  if (!found) throw py::value_error("unknown activation '" + name + "'");
  return *found;
}

void activation(const std::string& name, const Array& x, Array& y, double alpha, double beta) {
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const auto values = activation_of<T>(name).values;
    const auto from = reads<T>(x, "x", x.size());
    const auto to = writes<T>(y, "y", x.size());
    launch(x.size() <= kBrief / 16, [=, size = x.size()](const Places& at) {
      const T* numbers = at(from);
      T* results = at(to);
      by_parts(size, [&](Index first, Index last) {
        values(numbers + first, T(alpha), T(beta), results + first, last - first);
      });
    });
  });
}

void activation_gradient(const std::string& name, const Array& g, const Array& x, Array& dx,
                         double alpha, double beta) {
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const auto gradients = activation_of<T>(name).gradients;
    const auto upstream = reads<T>(g, "g", x.size());
    const auto from = reads<T>(x, "x", x.size());
    const auto to = writes<T>(dx, "dx", x.size());
    launch(x.size() <= kBrief / 16, [=, size = x.size()](const Places& at) {
      const T *above = at(upstream), *numbers = at(from);
      T* results = at(to);
      by_parts(size, [&](Index first, Index last) {
        gradients(above + first, numbers + first, T(alpha), T(beta), results + first, last - first);
      });
    });
  });
}

// An operand whose numbers are used again from the start after each `period`.
template <typename T>
struct Repeated {
  const T* data;
  Index period;

  // A short operand is copied several times side by side, because kernels process long runs.
  Repeated(const Array& a, const char* name, Index size) : data(in<T>(a, name, a.size())) {
    period = a.size();
    if (period < 1 ? size > 0 : size % period != 0) {
      throw py::value_error(std::string(name) + " of shape " + shape_text(a) +
                            " does not repeat to " + std::to_string(size) + " elements");
    }
    constexpr Index kRun = 512;
    if (period == size || period >= kRun) return;
    thread_local std::vector<T> kept[2];
    std::vector<T>& copies = kept[name[0] == 'y'];
    copies.clear();
    while (static_cast<Index>(copies.size()) < kRun) {
      copies.insert(copies.end(), data, data + a.size());
    }
    data = copies.data();
    period = static_cast<Index>(copies.size());
  }
};

// Calls body(at, from x, from y, length) for runs in which neither operand starts again.
template <typename T, typename Body>
void by_runs(const Repeated<T>& x, const Repeated<T>& y, Index size, const Body& body) {
  constexpr Index kMost = 1 << 12;  // in the first-level cache
  by_parts(size, [&](Index first, Index last) {
    for (Index at = first; at < last;) {
      const Index from_x = at % x.period, from_y = at % y.period;
      const Index run = std::min({kMost, last - at, x.period - from_x, y.period - from_y});
      body(at, x.data + from_x, y.data + from_y, run);
      at += run;
    }
  });
}

template <typename T>
const nn::Binary<T>& binary_of(const std::string& name) {
  const nn::Binary<T>* found = nn::find_binary<T>(name);
  if (!found) throw py::value_error("unknown operation '" + name + "'");
  return *found;
}

void binary(const std::string& name, const Array& x, const Array& y, Array& z) {
  with_real(z, "z", [&](auto zero) {
    using T = decltype(zero);
    const nn::Binary<T>& kind = binary_of<T>(name);
    T* to = out<T>(z, "z", z.size());
    const Repeated<T> one(x, "x", z.size()), other(y, "y", z.size());
    InterpreterRelease release(z.size() <= kBrief);
    by_runs(one, other, z.size(),
            [&](Index at, const T* a, const T* b, Index run) { kind.values(a, b, to + at, run); });
  });
}

void binary_gradient(const std::string& name, const Array& g, const Array& x, const Array& y,
                     MaybeArray dx, MaybeArray dy) {
  with_real(g, "g", [&](auto zero) {
    using T = decltype(zero);
    const nn::Binary<T>& kind = binary_of<T>(name);
    const T* upstream = in<T>(g, "g", g.size());
    T* by_x = out<T>(dx, "dx", g.size());
    T* by_y = out<T>(dy, "dy", g.size());
    const Repeated<T> one(x, "x", g.size()), other(y, "y", g.size());
    InterpreterRelease release(g.size() <= kBrief);
    by_runs(one, other, g.size(), [&](Index at, const T* a, const T* b, Index run) {
      kind.gradients(upstream + at, a, b, by_x ? by_x + at : by_x, by_y ? by_y + at : by_y, run);
    });
  });
}

void select(const Array& mask, const Array& x, const Array& y, Array& z) {
  with_real(z, "z", [&](auto zero) {
    using T = decltype(zero);
    const bool* chosen = in<bool>(mask, "mask", z.size());
    T* to = out<T>(z, "z", z.size());
    const Repeated<T> one(x, "x", z.size()), other(y, "y", z.size());
    InterpreterRelease release(z.size() <= kBrief);
    by_runs(one, other, z.size(), [&](Index at, const T* a, const T* b, Index run) {
      nn::select(reinterpret_cast<const std::uint8_t*>(chosen + at), a, b, to + at, run);
    });
  });
}

void reduce(const std::string& name, const Array& x, Array& y, Index outer, Index count,
            Index inner) {
  constexpr std::string_view kNames[] = {"sum", "max", "min", "prod"};
  const auto* named = std::find(std::begin(kNames), std::end(kNames), name);
  if (named == std::end(kNames)) throw py::value_error("unknown reduction '" + name + "'");
  const auto kind = static_cast<nn::Reduction>(named - kNames);
  if (std::min({outer, count, inner}) < 1) throw py::value_error("sizes must be at least 1");
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(x, "x", area(area(outer, count), inner));
    T* to = out<T>(y, "y", outer * inner);
    InterpreterRelease release(x.size() <= kBrief);
    nn::reduce(kind, from, to, outer, count, inner);
  });
}

void extremum_gradient(const Array& x, const Array& top, const Array& g, Array& dx, Index outer,
                       Index count, Index inner) {
  if (std::min({outer, count, inner}) < 1) throw py::value_error("sizes must be at least 1");
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(x, "x", area(area(outer, count), inner));
    const T* tops = in<T>(top, "top", outer * inner);
    const T* upstream = in<T>(g, "g", outer * inner);
    T* to = out<T>(dx, "dx", x.size());
    InterpreterRelease release(x.size() <= kBrief);
    nn::extremum_gradient(from, tops, upstream, to, outer, count, inner);
  });
}

// Copies an array to one of the same shape. Returns false, without copying, if the kernel does
// not support the types or the number of axes.
bool copy(const Array& source, Array& target) {
  const int axes = static_cast<int>(target.ndim());
  constexpr std::uint64_t kHasObject = 1;  // NumPy's NPY_ITEM_REFCOUNT, also of structured dtypes
  const bool has_object = (static_cast<std::uint64_t>(target.dtype().flags()) & kHasObject) != 0;
  if (!source.dtype().is(target.dtype()) || has_object || axes > nn::Strided::kMostAxes) {
    return false;
  }
  if (source.ndim() != axes || !std::equal(source.shape(), source.shape() + axes, target.shape())) {
    throw py::value_error("an array of shape " + shape_text(source) + " does not fit shape " +
                          shape_text(target));
  }
  if (!target.writeable()) throw py::value_error("the target is read-only");
  refuse_record();
  nn::Strided strided{axes, {}, {}, {}};
  std::copy_n(target.shape(), axes, strided.sizes);
  std::copy_n(source.strides(), axes, strided.from);
  std::copy_n(target.strides(), axes, strided.to);
  const char* from = static_cast<const char*>(source.data());
  char* to = static_cast<char*>(target.mutable_data());
  const auto item = target.itemsize();  // changes a count of references, and so needs the GIL
  InterpreterRelease release(target.size() <= kBrief);
  return nn::copy(strided, from, to, item);
}

void add_rows(const Array& rows, const Array& index, Array& y) {
  if (y.ndim() != 2) throw py::value_error("y must be [height, width], not " + shape_text(y));
  const Index height = y.shape(0), width = y.shape(1);
  const Index* to = in<Index>(index, "index", index.size());
  for (Index r = 0; r < index.size(); ++r) {
    if (to[r] < 0 || to[r] >= height) {
      throw py::value_error("index " + std::to_string(to[r]) + " is not in 0 to " +
                            std::to_string(height - 1));
    }
  }
  with_real(y, "y", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(rows, "rows", area(index.size(), width));
    T* sums = out<T>(y, "y", y.size());
    InterpreterRelease release(rows.size() <= kBrief);
    nn::add_rows(from, to, sums, index.size(), width, height);
  });
}

// Checks [rows, classes], and launches body(places, first, last, classes) for parts of the rows.
template <typename Body>
void by_class_rows(const Array& x, const Body& body) {
  if (x.ndim() != 2 || x.shape(1) < 1) {
    throw py::value_error("logits must be [rows, classes], not " + shape_text(x));
  }
  launch(x.size() <= kBrief / 16,
         [=, size = x.size(), classes = Index{x.shape(1)}](const Places& at) {
           by_parts(size, [&](Index first, Index last) {
             body(at, first / classes, last / classes, classes);
           });
         });
}

void softmax(const Array& x, Array& y, bool logarithm) {
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const auto from = reads<T>(x, "x", x.size());
    const auto to = writes<T>(y, "y", x.size());
    by_class_rows(x, [=](const Places& at, Index first, Index last, Index classes) {
      const Index skipped = first * classes;
      nn::softmax(at(from) + skipped, at(to) + skipped, last - first, classes, logarithm);
    });
  });
}

void softmax_gradient(const Array& g, const Array& y, Array& dx, bool logarithm) {
  with_real(y, "y", [&](auto zero) {
    using T = decltype(zero);
    const auto upstream = reads<T>(g, "g", y.size());
    const auto from = reads<T>(y, "y", y.size());
    const auto to = writes<T>(dx, "dx", y.size());
    by_class_rows(y, [=](const Places& at, Index first, Index last, Index classes) {
      const Index skipped = first * classes;
      nn::softmax_gradient(at(upstream) + skipped, at(from) + skipped, at(to) + skipped,
                           last - first, classes, logarithm);
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

void loss_rows(const std::string& name, const Array& t, const Array& p, Array& losses,
               MaybeArray slopes, double number) {
  with_real(p, "p", [&](auto zero) {
    using T = decltype(zero);
    const nn::Loss<T>* kind = nn::find_loss<T>(name);
    if (!kind) throw py::value_error("unknown loss '" + name + "'");
    const Index rows = losses.size(), size = rows ? count(p, "p", rows) : 0;
    const T* target = in<T>(t, "t", rows * size);
    const T* predicted = in<T>(p, "p", rows * size);
    T* to = out<T>(losses, "losses", rows);
    T* slope = out<T>(slopes, "slopes", rows * size);
    InterpreterRelease release(p.size() <= kBrief / 16);
    if (kind->labels) {
      int others = 0;  // without an exit from the loop, which compilers then vectorize
      for (Index i = 0; i < rows * size; ++i) others |= (target[i] != 0) & (target[i] != 1);
      number = others ? 0 : 1;
    }
    by_parts(rows * size, [&](Index first, Index last) {
      first /= std::max<Index>(size, 1);
      last /= std::max<Index>(size, 1);
      kind->rows(target + first * size, predicted + first * size, to + first,
                 slope ? slope + first * size : slope, last - first, size, T(number));
    });
  });
}

}  // namespace

void bind_pointwise(py::module_& m) {
  m.def("bias_relu", &bias_relu, "z"_a, "bias"_a, "relu"_a);
  m.def("sum_of_squares", &sum_of_squares, "x"_a);
  m.def("add_multiple", &add_multiple, "x"_a, "factor"_a, "y"_a, "z"_a);
  m.def("binary", &binary, "name"_a, "x"_a, "y"_a, "z"_a);
  m.def("binary_gradient", &binary_gradient, "name"_a, "g"_a, "x"_a, "y"_a, "dx"_a, "dy"_a);
  m.def("select", &select, "mask"_a, "x"_a, "y"_a, "z"_a);
  m.def("reduce", &reduce, "name"_a, "x"_a, "y"_a, "outer"_a, "count"_a, "inner"_a);
  m.def("extremum_gradient", &extremum_gradient, "x"_a, "top"_a, "g"_a, "dx"_a, "outer"_a,
        "count"_a, "inner"_a);
  m.def("copy", &copy, "source"_a, "target"_a);
  m.def("add_rows", &add_rows, "rows"_a, "index"_a, "y"_a);
  m.def("relu_gradient", &relu_gradient, "g"_a, "y"_a, "dz"_a, "bias_gradient"_a);
  m.def("activation", &activation, "name"_a, "x"_a, "y"_a, "alpha"_a = 1.0, "beta"_a = 0.0);
  m.def("activation_gradient", &activation_gradient, "name"_a, "g"_a, "x"_a, "dx"_a,
        "alpha"_a = 1.0, "beta"_a = 0.0);
  m.def("softmax", &softmax, "x"_a, "y"_a, "logarithm"_a);
  m.def("softmax_gradient", &softmax_gradient, "g"_a, "y"_a, "dx"_a, "logarithm"_a);
  m.def("softmax_cross_entropy", &softmax_cross_entropy, "logits"_a, "labels"_a, "losses"_a,
        "gradient"_a);
  m.def("loss_rows", &loss_rows, "name"_a, "t"_a, "p"_a, "losses"_a, "slopes"_a, "number"_a);
}

}  // namespace pycollective
