// The core's interface to CUDA devices. device.cc implements it if the build found nvcc, else
// no_cuda.cc.
#pragma once

#include <string>

namespace pycollective::device {
class Runtime;
}

namespace pycollective::cuda {

// Returns true if this build has the CUDA part.
bool built();

// Returns the CUDA runtime version of the build (e.g. 13000), 0 without CUDA.
int runtime_version();

// Returns the number of devices that the driver reports. If it is 0, `why` gets the reason.
int device_count(std::string* why);

// Returns the runtime for GPUs, always the same object. It does not call CUDA before one of its
// functions is called. Throws std::runtime_error in builds without CUDA.
device::Runtime& runtime();

}  // namespace pycollective::cuda
