// What the rest of the core may ask about CUDA devices. device.cc answers in builds that found
// nvcc, no_cuda.cc in all others.
#pragma once

#include <string>

namespace pycollective::device {
class Runtime;
}

namespace pycollective::cuda {

// Whether this build has the CUDA part.
bool built();

// CUDA runtime version the build was made with (e.g. 13000), 0 without CUDA.
int runtime_version();

// Number of devices the driver shows; 0 when there is none, and `why` then says so in words.
int device_count(std::string* why);

// What runs the executor for device arrays on GPUs; the same one in every call. Nothing is asked of
// CUDA before the first call of one of its functions. Throws std::runtime_error in builds without
// CUDA.
device::Runtime& runtime();

}  // namespace pycollective::cuda
