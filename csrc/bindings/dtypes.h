// Conversion of NumPy dtypes to the core's element types.
#pragma once

#include <pybind11/numpy.h>

#include <optional>
#include <string>
#include <utility>

#include "reduce/reduce.h"

namespace pycollective {

// Returns nothing for a dtype that the core cannot reduce, e.g. numbers in the other byte order.
std::optional<DType> find_dtype(const pybind11::dtype& dtype);

// The name of a dtype, as str() gives it, which takes several calls of Python's own.
std::string name_of(const pybind11::dtype& dtype);

// What to do with arrays of `dtype` when `op` is asked for. Throws TypeError for a dtype there is
// no reduction for and for an operation that has no meaning for the dtype, ValueError for an
// unknown operation; each says what there is.
std::pair<DType, Op> reduction_of(const pybind11::dtype& dtype, const std::string& op);

// Returns the element type of arrays to pack. Throws TypeError if the core does not have it.
DType packable(const pybind11::dtype& dtype);

}  // namespace pycollective
