#include "bindings/bindings.h"
#include "support/interpreter_release.h"

PYBIND11_MODULE(_core, m) {
  m.doc() = "The compiled core of pycollective; use it through the Python package.";
  m.attr("__version__") = pycollective::kVersion;
  m.attr("compiler") = pycollective::kCompiler;
  pycollective::share_interpreter_lock();
  pycollective::bind_schedule(m);
  pycollective::bind_group(m);
  pycollective::bind_communicator(m);
  pycollective::bind_measure(m);
  pycollective::bind_arrivals(m);
  pycollective::bind_arena(m);
  pycollective::bind_fast_calls(m);
  pycollective::bind_reduce(m);
  auto cuda = m.def_submodule("cuda", "The CUDA part of this build.");
  pycollective::bind_cuda(cuda);
  auto nccl = m.def_submodule("nccl", "NCCL's functions, loaded at run time.");
  pycollective::bind_nccl(nccl);
  auto device = m.def_submodule("device", "Calls on device arrays, by ranks of one process.");
  pycollective::bind_device(device);
}
