#include "bindings/errors.h"

#include <pybind11/pybind11.h>

#include <chrono>
#include <exception>
#include <new>
#include <stdexcept>
#include <utility>

#include "support/interpreter_release.h"

namespace py = pybind11;

namespace pycollective {
namespace {

const char* error_name(FailureKind kind) {
  switch (kind) {
    case FailureKind::timeout:
      return "CollectiveTimeoutError";
    case FailureKind::mismatch:
      return "MismatchError";
    case FailureKind::peer_lost:
      return "PeerLostError";
    case FailureKind::aborted:
      return "AbortedError";
  }
  return "CollectiveError";
}

}  // namespace

void set_python_error(const Failure& failure) {
  py::object type = py::module_::import("pycollective.errors").attr(error_name(failure.kind));
  PyErr_SetString(type.ptr(), failure.what());
}

void set_python_error() noexcept {
  try {
    throw;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const Failure& failure) {
    set_python_error(failure);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

Clock::duration duration_of(double seconds) {
  // A year stands for "for ever": the clock cannot hold every double.
  double bounded = seconds < 3e7 ? seconds : 3e7;
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded));
}

Clock::time_point deadline_in(double seconds) { return Clock::now() + duration_of(seconds); }

void look_at_signals() {
  InterpreterLock lock;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

Waiting waiting_for(double seconds, Interrupt interrupt) {
  auto now = Clock::now();
  return {now, now + duration_of(seconds), std::move(interrupt)};
}

}  // namespace pycollective
