#include "bindings/bindings.h"
#include "support/arrivals.h"
#include "support/interpreter_release.h"

namespace py = pybind11;

namespace pycollective {

void bind_arrivals(py::module_& m) {
  py::class_<Arrivals>(m, "Arrivals", "A counter with which threads signal each other.")
      .def(py::init<>())
      .def("add", &Arrivals::add, "Increment the count.")
      .def(
          "spin_until",
          [](const Arrivals& self, std::uint64_t count) {
            if (self.has(count)) return true;
            InterpreterRelease release;
            return self.spin_until(count);
          },
          py::arg("count"),
          "Spin until the count is reached, for about 1 ms at most. Return True if it was "
          "reached.");
}

}  // namespace pycollective
