#include "bindings/bindings.h"

namespace pycollective {

void bind_nn(pybind11::module_&) {}

}  // namespace pycollective
