// Batch and layer normalization.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
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

// Throws unless both or neither are given. With both, the kernels compute again where relu's input
// was positive, and mask the gradient.
void check_cut(const MaybeArray& factor, const MaybeArray& bias) {
  if (factor.has_value() != bias.has_value()) {
    throw py::value_error("factor and bias of relu's input go together: give both or none");
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

void normalize_rows(const Array& x, const Array& factor, const Array& shift, Array& y, Array& means,
                    Array& inverses, double epsilon) {
  const Index size = factor.size(), rows = rows_of(x, "x", size);
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* from = in<T>(x, "x", x.size());
    const T* factors = in<T>(factor, "factor", size);
    const T* shifts = in<T>(shift, "shift", size);
    T* to = out<T>(y, "y", x.size());
    T* mean = out<T>(means, "means", rows);
    T* inverse = out<T>(inverses, "inverses", rows);
    InterpreterRelease release(x.size() <= kBrief / 4);
    by_parts(x.size(), [&](Index first, Index last) {
      const Index r = first / size, at = r * size;
      nn::normalize_rows(from + at, factors, shifts, to + at, mean + r, inverse + r,
                         last / size - r, size, epsilon);
    });
  });
}

void normalize_rows_gradient(const Array& g, const Array& x, const Array& factor,
                             const Array& means, const Array& inverses, Array& dx, Array& by_factor,
                             Array& by_shift) {
  const Index size = factor.size(), rows = rows_of(x, "x", size);
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const T* upstream = in<T>(g, "g", x.size());
    const T* from = in<T>(x, "x", x.size());
    const T* factors = in<T>(factor, "factor", size);
    const T* mean = in<T>(means, "means", rows);
    const T* inverse = in<T>(inverses, "inverses", rows);
    T* to = out<T>(dx, "dx", x.size());
    T* factor_sums = out<T>(by_factor, "by_factor", size);
    T* shift_sums = out<T>(by_shift, "by_shift", size);
    InterpreterRelease release(x.size() <= kBrief / 4);
    const int parts =
        x.size() < kBrief ? 1 : static_cast<int>(std::clamp<Index>(rows, 1, nn::threads()));
    const auto both = static_cast<std::size_t>(2 * size);
    std::vector<std::vector<double>> totals(static_cast<std::size_t>(parts),
                                            std::vector<double>(both));
    nn::in_parallel(parts, [&](int part) {
      constexpr Index kRows = 256;  // short sums have small errors
      const Index last = nn::begin_of_part(rows, part + 1, parts);
      std::vector<T> sums(both);
      for (Index r = nn::begin_of_part(rows, part, parts); r < last; r += kRows) {
        std::fill(sums.begin(), sums.end(), T{0});
        const Index at = r * size;
        nn::normalize_rows_gradient(upstream + at, from + at, factors, mean + r, inverse + r,
                                    to + at, sums.data(), sums.data() + size,
                                    std::min(kRows, last - r), size);
        std::vector<double>& total = totals[static_cast<std::size_t>(part)];
        for (std::size_t k = 0; k < both; ++k) total[k] += static_cast<double>(sums[k]);
      }
    });
    for (Index k = 0; k < 2 * size; ++k) {
      double total = 0;
      for (const std::vector<double>& some : totals) total += some[static_cast<std::size_t>(k)];
      (k < size ? factor_sums[k] : shift_sums[k - size]) = static_cast<T>(total);
    }
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
  m.def("normalize_rows", &normalize_rows, "x"_a, "factor"_a, "shift"_a, "y"_a, "means"_a,
        "inverses"_a, "epsilon"_a);
  m.def("normalize_rows_gradient", &normalize_rows_gradient, "g"_a, "x"_a, "factor"_a, "means"_a,
        "inverses"_a, "dx"_a, "by_factor"_a, "by_shift"_a);
}

}  // namespace pycollective
