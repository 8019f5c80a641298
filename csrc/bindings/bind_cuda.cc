#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/interpreter_release.h"
#include "cuda/device.h"

namespace py = pybind11;

namespace pycollective {

void bind_cuda(py::module_& m) {
  m.def("built", &cuda::built, "Whether this build has the CUDA part.");
  m.def("runtime_version", &cuda::runtime_version,
        "CUDA runtime version of the build (e.g. 13000), 0 without CUDA.");
  m.def(
      "device_count",
      [] {
        std::string why;
        int count;
        {
          InterpreterRelease release;
          count = cuda::device_count(&why);
        }
        return std::make_pair(count, py::str(why));
      },
      "Number of CUDA devices and, when it is 0, the reason.");
}

}  // namespace pycollective
