// The wait of a call, and the warning about a long wait. A rank that has waited long without
// progress reports once, well before its deadline, for which ranks it waits.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "transport/group.h"

namespace pycollective {

struct Waiting {
  Clock::time_point began;
  Clock::time_point deadline;
  Interrupt interrupt;
};

struct Warning {
  Clock::duration after = Clock::duration::max();  // at the latest after half of the call's timeout
  std::function<void(const std::string&)> tell;    // called by any thread; empty: no warning
};

class LongWait {
 public:
  LongWait(const Warning& warning, Group& group, int rank, const Waiting& waiting)
      : warning_(warning), group_(group), rank_(rank), waiting_(waiting), since_(waiting.began) {}

  // Called every kWaitSlice while the rank waits for `awaited`. `moved`: there was progress since
  // the last check. Sends heartbeats. Throws what the interrupt throws.
  [[gnu::cold]] void check(const std::vector<int>& awaited, bool moved);

 private:
  const Warning& warning_;
  Group& group_;
  const int rank_;
  const Waiting& waiting_;
  Clock::time_point since_;  // time of the last progress
  Clock::time_point last_heartbeat_ = since_;
  bool warned_ = false;
};

// Returns true if a wait since `began` is long enough for the warning.
bool is_long(const Warning& warning, Clock::time_point began, Clock::time_point deadline,
             Clock::time_point now);
// Formats a duration: "10 s".
std::string in_seconds(Clock::duration duration);

}  // namespace pycollective
