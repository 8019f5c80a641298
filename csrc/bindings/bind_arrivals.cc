#include <atomic>
#include <cstdint>

#include "bindings/bindings.h"
#include "support/interpreter_release.h"
#include "support/tuning.h"
#include "support/waiter.h"

namespace py = pybind11;

namespace pycollective {
namespace {

// Counts what threads hand to each other by Python's means. A thread that waits for the next spins
// for a short time: to wake a thread that sleeps takes tens of µs.
class Arrivals {
 public:
  void add() { count_.fetch_add(1, std::memory_order_release); }

  bool spin_until(std::uint64_t count) const {
    const auto there = [&] { return count_.load(std::memory_order_acquire) >= count; };
    if (there()) return true;
    InterpreterRelease release;
    return pycollective::spin_until({kTeamSpins, kTeamYields}, there);
  }

 private:
  std::atomic<std::uint64_t> count_{0};
};

}  // namespace

void bind_arrivals(py::module_& m) {
  py::class_<Arrivals>(m, "Arrivals", "Counts what threads hand to each other.")
      .def(py::init<>())
      .def("add", &Arrivals::add, "Count one more.")
      .def("spin_until", &Arrivals::spin_until, py::arg("count"),
           "Spin until this number has arrived, for about 1 ms at most. Return True if it has.");
}

}  // namespace pycollective
