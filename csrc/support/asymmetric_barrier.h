// A memory barrier with an expensive side for a rank that goes to sleep. Its cheap side is for a
// peer that may have to wake that rank. The sleeper announces its sleep, passes the heavy barrier,
// and polls once more. The peer does its work, passes the light barrier, and reads the
// announcement. Every call passes the light barrier: a full fence there would take longer than the
// rest of a small call.
//
// On Linux the heavy barrier interrupts the other cores (membarrier), which makes the light barrier
// free. Both processes need the permission for membarrier, and a container may refuse it. A sleeper
// therefore announces its permission, and the peer chooses its barrier accordingly. On other
// systems both sides are ordinary fences.
#pragma once

#include <atomic>

namespace pycollective {

// Returns true if this process may interrupt other processes and be interrupted by them.
bool can_interrupt();
// Returns false if the barrier was only a fence of this thread.
bool heavy_barrier();

// `interrupts`: true if the thread on the heavy side can interrupt this process.
inline void light_barrier(bool interrupts) {
  static const bool interruptible = can_interrupt();
  if (interrupts && interruptible) {
    std::atomic_signal_fence(std::memory_order_seq_cst);
  } else {
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
}

}  // namespace pycollective
