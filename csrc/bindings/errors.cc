#include "bindings/errors.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
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

// Text from other processes may have been cut within a character.
py::object text_of(std::string_view text) {
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

std::string name_of_this_host() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

py::object error_of(const Failure& failure, const py::object& type) {
  const auto& ranks = failure.ranks();
  const auto& calls = failure.calls();
  py::tuple hosts(ranks.size());
  const std::string here = name_of_this_host();
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const bool is_here = i >= failure.hosts().size() || failure.hosts()[i].empty();
    hosts[i] = text_of(is_here ? here : failure.hosts()[i]);
  }
  py::dict about;
  about["ranks"] = py::tuple(py::cast(ranks));
  about["hosts"] = hosts;
  if (failure.kind != FailureKind::mismatch) {
    if (!calls.empty()) about["call"] = text_of(calls[0]);
  } else if (calls.size() == ranks.size()) {
    py::dict call_of;
    for (std::size_t i = 0; i < ranks.size(); ++i) call_of[py::int_(ranks[i])] = text_of(calls[i]);
    about["calls"] = call_of;
  }
  return type(text_of(failure.what()), **about);
}

}  // namespace

void set_python_error(const Failure& failure) {
  py::object type = py::module_::import("pycollective.errors").attr(error_name(failure.kind));
  PyErr_SetObject(type.ptr(), error_of(failure, type).ptr());
}

void set_python_error() noexcept {
  try {
    throw;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const Failure& failure) {
    try {
      set_python_error(failure);
    } catch (py::error_already_set& error) {  // there was no memory for the error
      error.restore();
    }
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

Clock::duration duration_of(double seconds) {
  // Bounded to about a year, because the clock cannot represent every double.
  double bounded = seconds < 3e7 ? seconds : 3e7;
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded));
}

Clock::time_point deadline_in(double seconds) { return Clock::now() + duration_of(seconds); }

void check_signals() {
  InterpreterLock lock;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

Waiting waiting_for(double seconds, Interrupt interrupt) {
  auto now = Clock::now();
  return {now, now + duration_of(seconds), std::move(interrupt)};
}

}  // namespace pycollective
