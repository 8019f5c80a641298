// Counts what threads hand to each other by means of their own.
#pragma once

#include <atomic>
#include <cstdint>

#include "support/tuning.h"
#include "support/waiter.h"

namespace pycollective {

// A thread that waits for the next arrival spins for a short time: to wake a thread that sleeps
// takes tens of µs.
class Arrivals {
 public:
  void add() { count_.fetch_add(1, std::memory_order_release); }
  bool has(std::uint64_t count) const { return count_.load(std::memory_order_acquire) >= count; }
  // Returns true if so many have arrived within about 1 ms.
  bool spin_until(std::uint64_t count) const {
    return pycollective::spin_until({kTeamSpins, kTeamYields}, [&] { return has(count); });
  }

 private:
  std::atomic<std::uint64_t> count_{0};
};

}  // namespace pycollective
