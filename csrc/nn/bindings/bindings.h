// The bindings of pycollective._nn. Each bind_<topic>.cc binds the kernels of some sections of
// nn/kernels.h; bind_record.cc binds the records of kernel calls.
#pragma once

#include <pybind11/pybind11.h>

namespace pycollective {

void bind_convolution(pybind11::module_& m);
void bind_dense(pybind11::module_& m);
void bind_normalization(pybind11::module_& m);
void bind_pointwise(pybind11::module_& m);
void bind_pooling(pybind11::module_& m);
void bind_record(pybind11::module_& m);
void bind_update(pybind11::module_& m);

}  // namespace pycollective
