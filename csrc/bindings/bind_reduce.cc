// The kernels of csrc/reduce, for tests and benchmarks.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/dtypes.h"
#include "reduce/half.h"
#include "support/interpreter_release.h"

namespace py = pybind11;

namespace pycollective {
namespace {

void check(const py::array& array, const py::array& like) {
  if (!(array.flags() & py::array::c_style) || array.size() != like.size() ||
      !array.dtype().equal(like.dtype())) {
    throw std::invalid_argument("all arrays must be C-contiguous and have the same size and dtype");
  }
}

void reduce_arrays(const std::string& op, const std::vector<py::array>& sources,
                   std::vector<py::array> outputs, int size) {
  if (sources.empty() || outputs.empty())
    throw std::invalid_argument("there must be at least one source and one output");
  auto [dtype, operation] = reduction_of(sources[0].dtype(), op);
  std::vector<const void*> from;
  std::vector<void*> to;
  for (const py::array& source : sources) {
    check(source, sources[0]);
    from.push_back(source.data());
  }
  for (py::array& output : outputs) {
    check(output, sources[0]);
    to.push_back(output.mutable_data());
  }
  auto count = static_cast<std::size_t>(sources[0].size());
  InterpreterRelease release;
  combine_many(dtype, operation, to.data(), to.size(), from.data(), from.size(), count, size);
}

void combine_arrays(const std::string& op, const py::array& a, const py::array& b, py::array output,
                    int size) {
  auto [dtype, operation] = reduction_of(a.dtype(), op);
  check(b, a);
  check(output, a);
  const Reduction& kernels = reduction(dtype, operation);
  const void *left = a.data(), *right = b.data();
  void* target = output.mutable_data();
  auto count = static_cast<std::size_t>(a.size());
  InterpreterRelease release;
  kernels.combine(target, left, right, count);
  if (size && kernels.finish) kernels.finish(target, count, size);
}

const HalfType& half_of(DType dtype, bool portable) {
  if (dtype == DType::bf16) return bfloat16();
  return portable ? portable_float16() : float16();
}

void convert_halves(const py::array& source, py::array output, bool portable) {
  auto from = find_dtype(source.dtype()), to = find_dtype(output.dtype());
  auto is_half = [](auto dtype) { return dtype == DType::f16 || dtype == DType::bf16; };
  bool widens = is_half(from) && to == DType::f32, narrows = from == DType::f32 && is_half(to);
  if (!(widens || narrows) || source.size() != output.size() ||
      !(source.flags() & py::array::c_style) || !(output.flags() & py::array::c_style)) {
    throw std::invalid_argument(
        "source and output must be C-contiguous and have the same size: one float32, the other "
        "float16 or bfloat16");
  }
  auto count = static_cast<std::size_t>(source.size());
  const HalfType& half = half_of(widens ? *from : *to, portable);
  const void* read = source.data();
  void* written = output.mutable_data();
  if (widens) {
    half.widen(static_cast<float*>(written), static_cast<const std::uint16_t*>(read), count);
  } else {
    half.narrow(static_cast<std::uint16_t*>(written), static_cast<const float*>(read), count);
  }
}

}  // namespace

void bind_reduce(py::module_& m) {
  m.def("reduce_arrays", &reduce_arrays, py::arg("op"), py::arg("sources"), py::arg("outputs"),
        py::arg("size") = 0,
        "Combine all sources, in order, into every output. `size`: the divisor of a mean, or 0.");
  m.def("combine_arrays", &combine_arrays, py::arg("op"), py::arg("a"), py::arg("b"),
        py::arg("output"), py::arg("size") = 0, "Combine two arrays, like one step of a schedule.");
  m.def("convert_halves", &convert_halves, py::arg("source"), py::arg("output"),
        py::arg("portable") = false,
        "Convert float16 or bfloat16 to float32, or back. `portable`: without F16C.");
}

}  // namespace pycollective
