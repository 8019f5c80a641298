#include "transport/shared_history.h"

#include <thread>

namespace pycollective {

CallRecord SharedHistory::call(std::uint64_t number) const {
  CallRecord call;
  for (int tries = 0;; ++tries) {
    std::uint64_t before = writing_.load(), last = number_.load();
    if (number > last || last + 1 - number >= kLength) number = last;
    call = records_[record_of_[number % kLength].load() % kRecords];
    call.fingerprint = fingerprint_of_[number % kLength].load();
    std::atomic_thread_fence(std::memory_order_acquire);
    // The rank may have begun to overwrite this entry with its next call.
    bool whole = before % 2 == 0 && writing_.load() == before;
    if (whole && number_.load() + 1 - number < kLength) break;
    if (tries == 1000) break;  // the process was stopped while it wrote: return the entry as it is
    std::this_thread::yield();
  }
  // Names must end, whatever bytes the memory has.
  call.collective[sizeof call.collective - 1] = call.algorithm[sizeof call.algorithm - 1] = 0;
  call.op[sizeof call.op - 1] = call.dtype[sizeof call.dtype - 1] = 0;
  call.number = number;
  return call;
}

KnownCalls known_calls(const SharedHistory& history) {
  KnownCalls found;
  std::uint64_t last = history.number();
  for (std::uint64_t n = last; n > 0 && last - n < SharedHistory::kLength; --n) {
    CallRecord call = history.call(n);
    if (call.number == n) found.emplace_back(call);
  }
  return found;
}

}  // namespace pycollective
