#include "cuda/device.h"

#include <cuda_runtime_api.h>

namespace pycollective::cuda {

bool built() { return true; }

int runtime_version() { return CUDART_VERSION; }

int device_count(std::string* why) {
  int count = 0;
  cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
    *why = cudaGetErrorString(status);
    return 0;
  }
  why->clear();
  return count;
}

}  // namespace pycollective::cuda
