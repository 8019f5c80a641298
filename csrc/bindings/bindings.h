// One bind_<topic>.cc for each topic. Bindings only convert arguments, and release the GIL in every
// call that may block.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <string_view>

namespace pycollective {

// Appends to a list such as "a, b, c" of valid names.
inline void append_name(std::string& list, std::string_view name) {
  if (!list.empty()) list.append(", ");
  list.append(name);
}

// The package's version, and the compiler's name and version.
extern const char* const kVersion;
extern const char* const kCompiler;

void bind_schedule(pybind11::module_& m);
void bind_group(pybind11::module_& m);
void bind_communicator(pybind11::module_& m);
void bind_measure(pybind11::module_& m);
void bind_arrivals(pybind11::module_& m);
void bind_arena(pybind11::module_& m);
void bind_fast_calls(pybind11::module_& m);
void bind_reduce(pybind11::module_& m);
void bind_cuda(pybind11::module_& m);
void bind_nccl(pybind11::module_& m);
void bind_device(pybind11::module_& m);

}  // namespace pycollective
