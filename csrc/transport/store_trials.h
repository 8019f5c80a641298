// A rank writes arrays that exceed the caches with plain stores, or past the caches
// (support/copy.h). The faster way depends on the processor, and on the part of the last-level
// cache that other programs leave. So the first calls of a collective and a size (a power of two)
// try plain stores, then stores past the caches. The first call of each way is not timed.
// Later calls try again. A rank's choice does not change what its peers do.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>

#include "schedule/collective.h"
#include "support/copy.h"
#include "support/tuning.h"
#include "support/wait_queue.h"

namespace pycollective {

class StoreTrials {
 public:
  // Begins a call, whose ranks' arrays have `moved` bytes together. Returns true if this rank
  // writes past the caches.
  bool begin(Collective collective, std::size_t moved) {
    timed_ = nullptr;
    if (moved < past_cache_from()) return false;
    if (past_cache_setting() != 0) return true;
    const int size_class = std::min<int>(std::bit_width(moved >> kLeastShift), kSizes - 1);
    Choice& choice = choices_[static_cast<int>(collective)][size_class];
    const int turn = choice.turn;
    const std::size_t period = std::max(kCopyPeriodBytes / moved, kLeastCopyPeriod);
    choice.turn = static_cast<int>(static_cast<std::size_t>(turn + 1) % period);
    if (turn >= 2 * kStoreTrials) return choice.seconds[1] < choice.seconds[0];
    const int way = turn / kStoreTrials;
    if (turn % kStoreTrials == 0) {
      choice.seconds[way] = kNotTimed;
    } else {
      timed_ = &choice.seconds[way];
    }
    began_ = Clock::now();
    return way == 1;
  }
  void end() {
    if (!timed_) return;
    *timed_ = std::min(*timed_, std::chrono::duration<float>(Clock::now() - began_).count());
    timed_ = nullptr;
  }

 private:
  static constexpr int kSizes = 16, kLeastShift = 22;  // the first class ends at 4 MiB
  static constexpr float kNotTimed = 1e9F;             // s
  struct Choice {
    int turn = 0;  // of its period
    float seconds[2] = {kNotTimed, kNotTimed};
  };
  Choice choices_[kDirectCollectives][kSizes];
  float* timed_ = nullptr;  // the time that the present call may lower
  Clock::time_point began_;
};

}  // namespace pycollective
