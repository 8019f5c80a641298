#include <algorithm>
#include <thread>

#include "support/futex.h"

namespace pycollective {

bool futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected,
                std::chrono::nanoseconds limit) {
  if (word.load() != expected) return true;
  std::this_thread::sleep_for(std::min(limit, std::chrono::nanoseconds(50'000)));
  return true;
}

void futex_wake_all(std::atomic<std::uint32_t>&) {}

}  // namespace pycollective
