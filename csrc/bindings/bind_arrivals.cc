#include <atomic>
#include <cstdint>
#include <thread>

#include "bindings/bindings.h"
#include "support/interpreter_release.h"
#include "support/pause.h"
#include "support/tuning.h"

namespace py = pybind11;

namespace pycollective {
namespace {

// Counts what threads hand to each other by Python's means, so that one that waits can look out for
// the next for a short time: to wake a thread that sleeps takes tens of µs.
class Arrivals {
 public:
  void add() { count_.fetch_add(1, std::memory_order_release); }

  bool look_out(std::uint64_t count) const {
    const auto there = [&] { return count_.load(std::memory_order_acquire) >= count; };
    if (there()) return true;
    InterpreterRelease release;
    for (int i = 0; i < kTeamLooks && !there(); ++i) pause();
    for (int i = 0; i < kTeamYields && !there(); ++i) std::this_thread::yield();
    return there();
  }

 private:
  std::atomic<std::uint64_t> count_{0};
};

}  // namespace

void bind_arrivals(py::module_& m) {
  py::class_<Arrivals>(m, "Arrivals", "Counts what threads hand to each other.")
      .def(py::init<>())
      .def("add", &Arrivals::add, "Count one more.")
      .def("look_out", &Arrivals::look_out, py::arg("count"),
           "Look out for the arrival of this number, for about 1 ms at most; return whether it is "
           "there.");
}

}  // namespace pycollective
