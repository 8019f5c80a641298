// NumPy arrays created by the bindings.
#pragma once

#include <pybind11/numpy.h>

#include <cstddef>
#include <memory>

#include "transport/arena.h"

namespace pycollective {

// Returns a new array that owns its memory. It lies in the arena if it has at least `from` bytes
// and the arena exists and has enough free memory; otherwise NumPy allocates it. Throws Python's
// error.
pybind11::object new_array(const std::shared_ptr<Arena>& arena, PyObject* descr, int dims,
                           const Py_intptr_t* shape, std::size_t from);

}  // namespace pycollective
