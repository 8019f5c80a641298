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
    const auto from = reads<T>(x, "x", x.size());
    const auto means = writes<T>(mean, "mean", channels);
    const auto variances = writes<T>(variance, "variance", channels);
    launch(x.size() <= kBrief / 4, [=](const Places& at) {
      nn::batch_moments(at(from), at(means), at(variances), rows, channels);
    });
  });
}

void move_average(const Array& average, const Array& value, Array& moved, double weight) {
  with_real(average, "average", [&](auto zero) {
    using T = decltype(zero);
    const Index size = average.size();
    const auto from = reads<T>(average, "average", size);
    const auto values = reads<T>(value, "value", size);
    const auto to = writes<T>(moved, "moved", size);
    launch(true, [=](const Places& at) {
      nn::move_average(at(from), at(values), at(to), size, static_cast<T>(weight));
    });
  });
}

// The arguments of both kernels that normalize a batch.
template <typename T>
struct BatchOperands {
  Operand<const T> x, factor, shift, mean, variance;
  Index rows, channels;
  T epsilon;
  bool relu;

  BatchOperands(const Array& images, const MaybeArray& factors, const MaybeArray& shifts,
                const Array& means, const Array& variances, double added, bool with_relu)
      : x(reads<T>(images, "x", images.size())),
        factor(reads<T>(factors, "factor", means.size())),
        shift(reads<T>(shifts, "shift", means.size())),
        mean(reads<T>(means, "mean", means.size())),
        variance(reads<T>(variances, "variance", means.size())),
        rows(rows_of(images, "x", means.size())),
        channels(means.size()),
        epsilon(static_cast<T>(added)),
        relu(with_relu) {}

  nn::Batch<T> at(const Places& at) const {
    return {at(x), at(factor), at(shift), at(mean), at(variance), rows, channels, epsilon, relu};
  }
};

void normalize_batch(const Array& x, const MaybeArray& factor, const MaybeArray& shift,
                     const Array& mean, const Array& variance, Array& y, double epsilon,
                     bool relu) {
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const BatchOperands<T> batch(x, factor, shift, mean, variance, epsilon, relu);
    const auto to = writes<T>(y, "y", x.size());
    launch(x.size() <= kBrief / 4,
           [=](const Places& at) { nn::normalize_batch(batch.at(at), at(to)); });
  });
}

void normalize_batch_gradient(const Array& g, const Array& x, const MaybeArray& factor,
                              const MaybeArray& shift, const Array& mean, const Array& variance,
                              MaybeArray dx, Array& by_factor, Array& by_shift, double epsilon,
                              bool relu, bool constant) {
  with_real(x, "x", [&](auto zero) {
    using T = decltype(zero);
    const BatchOperands<T> batch(x, factor, shift, mean, variance, epsilon, relu);
    const auto upstream = reads<T>(g, "g", x.size());
    const auto to = writes<T>(dx, "dx", x.size());
    const auto first = writes<T>(by_factor, "by_factor", batch.channels);
    const auto second = writes<T>(by_shift, "by_shift", batch.channels);
    launch(x.size() <= kBrief / 4, [=](const Places& at) {
      nn::normalize_batch_gradient(batch.at(at), constant, at(upstream), at(to), at(first),
                                   at(second));
    });
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
        x.size() < kBrief ? 1 : static_cast<int>(std::clamp<Index>(rows, 1, threads()));
    const auto both = static_cast<std::size_t>(2 * size);
    std::vector<std::vector<double>> totals(static_cast<std::size_t>(parts),
                                            std::vector<double>(both));
    in_parallel(parts, [&](int part) {
      constexpr Index kRows = 256;  // short sums have small errors
      const Index last = begin_of_part(rows, part + 1, parts);
      std::vector<T> sums(both);
      for (Index r = begin_of_part(rows, part, parts); r < last; r += kRows) {
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
  m.def("move_average", &move_average, "average"_a, "value"_a, "moved"_a, "weight"_a);
  m.def("normalize_batch", &normalize_batch, "x"_a, "factor"_a, "shift"_a, "mean"_a, "variance"_a,
        "y"_a, "epsilon"_a, "relu"_a = false);
  m.def("normalize_batch_gradient", &normalize_batch_gradient, "g"_a, "x"_a, "factor"_a, "shift"_a,
        "mean"_a, "variance"_a, "dx"_a, "by_factor"_a, "by_shift"_a, "epsilon"_a, "relu"_a = false,
        "constant"_a = false);
  m.def("normalize_rows", &normalize_rows, "x"_a, "factor"_a, "shift"_a, "y"_a, "means"_a,
        "inverses"_a, "epsilon"_a);
  m.def("normalize_rows_gradient", &normalize_rows_gradient, "g"_a, "x"_a, "factor"_a, "means"_a,
        "inverses"_a, "dx"_a, "by_factor"_a, "by_shift"_a);
}

}  // namespace pycollective
