#include <pybind11/stl.h>

#include <utility>

#include "bindings/bindings.h"
#include "executor/measure.h"
#include "support/copy.h"
#include "support/interpreter_release.h"
#include "support/tuning.h"

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
  m.def(
      "measure_handshake",
      [](const py::buffer& lines, int rank, int ranks, int rounds, bool crowd) {
        const py::buffer_info memory = lines.request(/*writable=*/true);
        const auto needed = static_cast<py::ssize_t>(ranks) * static_cast<py::ssize_t>(kCacheLine);
        if (rank < 0 || rank >= ranks || rounds < 1 || memory.size * memory.itemsize < needed) {
          throw py::value_error("a handshake needs a cache line for each rank, and rounds");
        }
        InterpreterRelease release;
        return measure_handshake(static_cast<std::byte*>(memory.ptr), rank, ranks, rounds, crowd);
      },
      py::arg("lines"), py::arg("rank"), py::arg("ranks"), py::arg("rounds"), py::arg("crowd"),
      "Seconds of a round in which each rank writes its cache line and waits for all others'.");
}

}  // namespace pycollective
