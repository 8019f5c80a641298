// A memory barrier of two unequal sides, for a rank that goes to sleep and one that may have to
// wake it: whoever sleeps says so and passes the heavy side before it looks a last time; whoever
// has done something passes the light side before it looks who sleeps. The light side is passed in
// every call, and waiting there until all that was written has reached the others would take longer
// than the rest of a small call.
//
// asymmetric_barrier_linux.cc has the heavy side interrupt the other cores (membarrier);
// elsewhere, and where the system does not let us, both sides are ordinary fences.
#pragma once

#include <atomic>

namespace pycollective {

// Whether the light side costs nothing in this process.
bool has_light_barrier();
void heavy_barrier();

inline void light_barrier() {
  static const bool free = has_light_barrier();
  if (free) {
    std::atomic_signal_fence(std::memory_order_seq_cst);
  } else {
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
}

}  // namespace pycollective
