#include "support/waiter.h"
#include "transport/group.h"
#include "transport/transport.h"

namespace pycollective {

bool Endpoint::wait(const std::function<Progress()>& attempt, Clock::time_point deadline,
                    const Interrupt& interrupt) {
  std::uint64_t before = moved();
  auto poll = [&] {
    const Progress progress = attempt();
    const std::uint64_t now = moved();
    const bool arrived = std::exchange(before, now) != now;
    return progress == Progress::blocked && arrived ? Progress::moved : progress;
  };
  return Waiter(*this, poll, deadline, interrupt).wait();
}

void Endpoint::time_out() {
  const Failure timeout = timeout_failure(group(), rank(), awaited(), call());
  group().fail(timeout);
  check();
  throw timeout;
}

}  // namespace pycollective
