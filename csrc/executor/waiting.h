// How a call waits; and that a rank which has waited long, while nothing moved, says once for whom,
// well before its deadline.
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

// When and to whom it is said.
struct Warning {
  Clock::duration after = Clock::duration::max();  // of waiting; or half of the time there is
  std::function<void(const std::string&)> tell;    // by any thread; nobody if empty
};

// One wait. It is looked at only where the rank sleeps.
class LongWait {
 public:
  LongWait(const Warning& warning, Group& group, int rank, const Waiting& waiting)
      : warning_(warning), group_(group), rank_(rank), waiting_(waiting), since_(waiting.began) {}

  // `awaited`: the ranks without which the call does not go on. `moved`: whether it has gone on
  // since the last time. Throws what the interrupt throws.
  [[gnu::cold]] void check(const std::vector<int>& awaited, bool moved);

 private:
  const Warning& warning_;
  Group& group_;
  const int rank_;
  const Waiting& waiting_;
  Clock::time_point since_;  // nothing has moved
  Clock::time_point beaten_ = since_;
  bool said_ = false;
};

// Returns true when a call that began then has waited long.
bool is_long(const Warning& warning, Clock::time_point began, Clock::time_point deadline,
             Clock::time_point now);
// "10 s" for a duration.
std::string in_seconds(Clock::duration duration);

}  // namespace pycollective
