#include <stdexcept>

#include "cuda/device.h"

namespace pycollective::cuda {
namespace {

constexpr char kWhy[] =
    "this build has no CUDA part, because nvcc 12 or later was not found: install it and build "
    "again";

}  // namespace

bool built() { return false; }

int runtime_version() { return 0; }

int device_count(std::string* why) {
  *why = kWhy;
  return 0;
}

device::Runtime& runtime() { throw std::runtime_error(kWhy); }

}  // namespace pycollective::cuda
