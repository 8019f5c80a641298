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

// Returns a dtype's name, as str() does, but without Python calls for common dtypes.
std::string name_of(const pybind11::dtype& dtype);

// Returns the element type and the operation for arrays of `dtype`. Throws TypeError for a dtype
// without reductions or without this operation, ValueError for an unknown operation; the messages
// list the valid ones.
std::pair<DType, Op> reduction_of(const pybind11::dtype& dtype, const std::string& op);

// Returns the element type of arrays to pack. Throws TypeError if the core does not have it.
DType packable(const pybind11::dtype& dtype);

}  // namespace pycollective
