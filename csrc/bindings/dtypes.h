// Which element type of the core a NumPy dtype is; the only place that knows.
#pragma once

#include <pybind11/numpy.h>

#include <optional>
#include <string>
#include <utility>

#include "reduce/reduce.h"

namespace pycollective {

// Nothing for a dtype that the core cannot reduce, numbers in the other byte order among them.
std::optional<DType> find_dtype(const pybind11::dtype& dtype);

// The name of a dtype, as str() gives it, which takes several calls of Python's own.
std::string name_of(const pybind11::dtype& dtype);

// What to do with arrays of `dtype` when `op` is asked for. Throws TypeError for a dtype there is
// no reduction for and for an operation that has no meaning for the dtype, ValueError for an
// unknown operation; each says what there is.
std::pair<DType, Op> reduction_of(const pybind11::dtype& dtype, const std::string& op);

// The type of arrays that are packed. Throws TypeError for one that the core does not have.
DType packable(const pybind11::dtype& dtype);

}  // namespace pycollective
