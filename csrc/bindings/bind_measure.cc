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
        "Return the seconds of each all-reduce of float32 sums among threads. `how`: executor, "
        "plain_ring, plain_loop or an algorithm's name (executor/measure.h).");
  m.def(
      "measure_rates",
      [](int ranks, std::size_t bytes, int iterations) {
        Rates rates = measure_rates(ranks, bytes, iterations);
        return std::pair(rates.copy, rates.reduce);
      },
      py::arg("ranks"), py::arg("bytes"), py::arg("iterations"),
      py::call_guard<InterpreterRelease>(),
      "Return the bytes per second that each of `ranks` concurrent threads copies, and adds.");
  m.def("past_cache_from", &past_cache_from,
        "Return the bytes of all ranks' arrays from which a call may use non-temporal stores.");
  m.def("set_past_cache_from", &set_past_cache_from, py::arg("bytes"),
        "Set past_cache_from() for this process. With 0, the default, calls from the size of the "
        "last cache level on try both kinds of stores.");
  m.def("past_cache_setting", &past_cache_setting,
        "Return the value that set_past_cache_from() has set; 0: none.");
  m.def(
      "measure_handshake",
      [](const py::buffer& lines, int rank, int ranks, int rounds, bool oversubscribed) {
        const py::buffer_info memory = lines.request(/*writable=*/true);
        const auto needed = static_cast<py::ssize_t>(ranks) * static_cast<py::ssize_t>(kCacheLine);
        if (rank < 0 || rank >= ranks || rounds < 1 || memory.size * memory.itemsize < needed) {
          throw py::value_error(
              "measure_handshake needs a cache line for each rank, a rank of these, and 1 round or "
              "more");
        }
        InterpreterRelease release;
        return measure_handshake(static_cast<std::byte*>(memory.ptr), rank, ranks, rounds,
                                 oversubscribed);
      },
      py::arg("lines"), py::arg("rank"), py::arg("ranks"), py::arg("rounds"),
      py::arg("oversubscribed"),
      "Return the seconds of a round in which each rank writes its cache line and polls all "
      "others.");
}

}  // namespace pycollective
