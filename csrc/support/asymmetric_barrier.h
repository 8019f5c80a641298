// A memory barrier of two unequal sides, for a rank that goes to sleep and one that may have to
// wake it: whoever sleeps says so and passes the heavy side before it looks a last time; whoever
// has done something passes the light side before it looks who sleeps. The light side is passed in
// every call, and waiting there until all that was written has reached the others would take longer
// than the rest of a small call.
//
// asymmetric_barrier_linux.cc has the heavy side interrupt the other cores (membarrier). The light
// side is then free, but only if both processes may do that, which containers may forbid: a rank
// that sleeps says whether it may, and whoever wakes it passes the barrier of that kind. Elsewhere
// both sides are ordinary fences.
#pragma once

#include <atomic>

namespace pycollective {

// True if this process may interrupt others, and be interrupted by them.
bool can_interrupt();
// Returns false if the barrier was only a fence of this thread's.
bool heavy_barrier();

// `interrupts`: whether whoever passes the heavy side can interrupt this process.
inline void light_barrier(bool interrupts) {
  static const bool interruptible = can_interrupt();
  if (interrupts && interruptible) {
    std::atomic_signal_fence(std::memory_order_seq_cst);
  } else {
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
}

}  // namespace pycollective
