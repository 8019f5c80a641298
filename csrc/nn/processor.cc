#include "nn/processor.h"

#include <algorithm>
#include <atomic>

namespace pycollective::nn {
namespace {

int widest() {
#ifdef PYCOLLECTIVE_X86_TARGETS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return 64;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi2")) {
    return 32;
  }
#endif
  return 16;
}

std::atomic<int> limit{64};

}  // namespace

int vector_bytes() {
  static const int supported = widest();
  return std::min(supported, limit.load(std::memory_order_relaxed));
}

int limit_vector_bytes(int bytes) { return limit.exchange(bytes); }

}  // namespace pycollective::nn
