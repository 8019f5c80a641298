// A counter with which threads tell each other that they have finished a piece of work.
#pragma once

#include <atomic>
#include <cstdint>

#include "support/tuning.h"
#include "support/waiter.h"

namespace pycollective {

// A waiting thread spins for a short time before it sleeps, because waking a thread takes tens of
// µs.
class Arrivals {
 public:
  void add() { count_.fetch_add(1, std::memory_order_release); }
  bool has(std::uint64_t count) const { return count_.load(std::memory_order_acquire) >= count; }
  // Returns true if the count is reached within about 1 ms.
  bool spin_until(std::uint64_t count) const {
    return pycollective::spin_until({kTeamSpins, kTeamYields}, [&] { return has(count); });
  }

 private:
  std::atomic<std::uint64_t> count_{0};
};

}  // namespace pycollective
