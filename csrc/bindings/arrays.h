// NumPy arrays that the bindings make.
#pragma once

#include <pybind11/numpy.h>

#include <cstddef>
#include <memory>

#include "transport/arena.h"

namespace pycollective {

// Returns a new array, which owns its memory: in the arena if it takes at least `from` bytes, the
// arena is there and has room, else where NumPy makes arrays. Throws what Python raises.
pybind11::object new_array(const std::shared_ptr<Arena>& arena, PyObject* descr, int dims,
                           const Py_intptr_t* shape, std::size_t from);

}  // namespace pycollective
