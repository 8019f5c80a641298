#include <pybind11/stl.h>

#include <utility>

#include "bindings/bindings.h"
#include "executor/measure.h"
#include "support/copy.h"
#include "support/interpreter_release.h"

namespace py = pybind11;

namespace pycollective {

void bind_measure(py::module_& m) {
  m.def("measure_all_reduce", &measure_all_reduce, py::arg("how"), py::arg("ranks"),
        py::arg("bytes"), py::arg("iterations"), py::call_guard<InterpreterRelease>(),
        "Seconds of each iteration of a float32 sum among threads, done in the way `how`.");
  m.def(
      "measure_rates",
      [](int ranks, std::size_t bytes, int iterations) {
        Rates rates = measure_rates(ranks, bytes, iterations);
        return std::pair(rates.copy, rates.reduce);
      },
      py::arg("ranks"), py::arg("bytes"), py::arg("iterations"),
      py::call_guard<InterpreterRelease>(),
      "Bytes a second that each of `ranks` threads copies, and adds, at the same time.");
  m.def("past_cache_from", &past_cache_from,
        "From how many bytes of all ranks' arrays on a call's copies go past the caches.");
  m.def("set_past_cache_from", &set_past_cache_from, py::arg("bytes"),
        "Set it for this process; 0: the size of the last cache level.");
}

}  // namespace pycollective
