// Updates of parameters by optimizers.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <type_traits>
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
using Arrays = std::vector<py::array>;

// Several arrays as one sequence of numbers, which threads divide.
template <typename T>
struct Run {
  std::vector<T*> data;

  Run(const Arrays& arrays, const char* name, const std::vector<Index>& sizes) {
    if (arrays.size() != sizes.size()) {
      throw py::value_error("there are " + std::to_string(arrays.size()) + " arrays " + name +
                            " for " + std::to_string(sizes.size()) + " parameters");
    }
    for (std::size_t k = 0; k < arrays.size(); ++k) {
      check<std::remove_const_t<T>>(arrays[k], name, sizes[k], !std::is_const_v<T>);
      data.push_back(static_cast<T*>(const_cast<void*>(arrays[k].data())));
    }
  }
};

std::vector<Index> sizes_of(const Arrays& arrays) {
  std::vector<Index> sizes;
  for (const Array& a : arrays) sizes.push_back(a.size());
  return sizes;
}

// Calls body(k, first, count) for ranges of the numbers of arrays k = 0, 1, ... of these sizes. The
// ranges cover all numbers.
template <typename Body>
void over_all(const std::vector<Index>& sizes, const Body& body) {
  const Index total = std::accumulate(sizes.begin(), sizes.end(), Index{0});
  InterpreterRelease release(total <= kBrief / 8);
  by_parts(total, [&](Index first, Index last) {
    Index begin = 0;
    for (std::size_t k = 0; k < sizes.size(); begin += sizes[k++]) {
      const Index from = std::max(first - begin, Index{0});
      const Index to = std::min(last - begin, sizes[k]);
      if (from < to) body(k, from, to - from);
    }
  });
}

// Returns true if the kernels support all arrays: they have one type, C order and alignment. The
// arrays at the same index of each column must have the same shape.
bool alike(const std::vector<std::vector<py::object>>& columns) {
  const py::dtype real = py::dtype::of<float>(), wide = py::dtype::of<double>();
  constexpr int kPlain = int{py::array::c_style} | int{py::detail::npy_api::NPY_ARRAY_ALIGNED_};
  py::object kind;
  for (const auto& column : columns) {
    if (column.size() != columns[0].size()) return false;
    for (std::size_t k = 0; k < column.size(); ++k) {
      if (!py::isinstance<py::array>(column[k])) return false;
      const auto array = py::reinterpret_borrow<py::array>(column[k]);
      if (!kind) kind = array.dtype();
      if (!array.dtype().is(kind) || (array.flags() & kPlain) != kPlain) return false;
      const auto first = py::reinterpret_borrow<py::array>(columns[0][k]);
      if (!std::equal(array.shape(), array.shape() + array.ndim(), first.shape(),
                      first.shape() + first.ndim())) {
        return false;
      }
    }
  }
  return kind && (kind.is(real) || kind.is(wide));
}

void rule_update(const std::string& name, const Arrays& p, const Arrays& g,
                 const std::vector<Arrays>& slots, const std::vector<double>& numbers) {
  if (p.empty()) return;
  with_real(p[0], "p", [&](auto zero) {
    using T = decltype(zero);
    const nn::Rule<T>* rule = nn::find_rule<T>(name);
    if (!rule) throw py::value_error("unknown rule '" + name + "'");
    if (static_cast<int>(slots.size()) != rule->slots ||
        static_cast<int>(numbers.size()) != rule->numbers) {
      throw py::value_error("the rule " + name + " has " + std::to_string(rule->slots) +
                            " slots and " + std::to_string(rule->numbers) + " numbers");
    }
    const std::vector<Index> sizes = sizes_of(p);
    const Run<T> parameters(p, "p", sizes), first(slots.front(), "m", sizes),
        second(slots.back(), "v", sizes);
    const Run<const T> gradients(g, "g", sizes);
    const std::vector<T> c(numbers.begin(), numbers.end());
    over_all(sizes, [&](std::size_t k, Index at, Index count) {
      rule->steps(parameters.data[k] + at, gradients.data[k] + at, first.data[k] + at,
                  slots.size() > 1 ? second.data[k] + at : nullptr, count, c.data());
    });
  });
}

void sgd_update(const Arrays& p, const Arrays& g, const std::optional<Arrays>& velocity,
                double rate, double momentum, bool nesterov) {
  if (p.empty()) return;
  with_real(p[0], "p", [&](auto zero) {
    using T = decltype(zero);
    const std::vector<Index> sizes = sizes_of(p);
    const Run<T> parameters(p, "p", sizes);
    const Run<const T> gradients(g, "g", sizes);
    std::optional<Run<T>> speeds;
    if (velocity) speeds.emplace(*velocity, "velocity", sizes);
    over_all(sizes, [&](std::size_t k, Index at, Index count) {
      nn::sgd_update(parameters.data[k] + at, gradients.data[k] + at,
                     speeds ? speeds->data[k] + at : nullptr, count, rate, momentum, nesterov);
    });
  });
}

void rmsprop_update(Array& p, const Array& g, Array& v, MaybeArray mean, MaybeArray speed,
                    double rate, double rho, double momentum, double epsilon) {
  with_real(p, "p", [&](auto zero) {
    using T = decltype(zero);
    const Index n = p.size();
    T* parameter = out<T>(p, "p", n);
    const T* gradient = in<T>(g, "g", n);
    T* squares = out<T>(v, "v", n);
    T* means = out<T>(mean, "mean", n);
    T* steps = out<T>(speed, "speed", n);
    InterpreterRelease release(n <= kBrief / 8);
    by_parts(n, [&](Index first, Index last) {
      nn::rmsprop_update(parameter + first, gradient + first, squares + first,
                         means ? means + first : means, steps ? steps + first : steps, last - first,
                         rate, rho, momentum, epsilon);
    });
  });
}

}  // namespace

void bind_update(py::module_& m) {
  m.def("alike", &alike, "columns"_a,
        "Return True if all arrays of the lists have one type that kernels support, and those at "
        "the same index have the same shape.");
  m.def("rule_update", &rule_update, "name"_a, "p"_a, "g"_a, "slots"_a, "numbers"_a);
  m.def("sgd_update", &sgd_update, "p"_a, "g"_a, "velocity"_a, "rate"_a, "momentum"_a,
        "nesterov"_a);
  m.def("rmsprop_update", &rmsprop_update, "p"_a, "g"_a, "v"_a, "mean"_a, "speed"_a, "rate"_a,
        "rho"_a, "momentum"_a, "epsilon"_a);
}

}  // namespace pycollective
