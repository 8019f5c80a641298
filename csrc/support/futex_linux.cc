#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>

#include "support/futex.h"

namespace pycollective {

bool futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected,
                std::chrono::nanoseconds limit) {
  static_assert(sizeof(word) == sizeof(std::uint32_t), "a futex is a plain 32-bit word");
  timespec wait;
  wait.tv_sec = static_cast<time_t>(limit.count() / 1'000'000'000);
  wait.tv_nsec = static_cast<long>(limit.count() % 1'000'000'000);
  return syscall(SYS_futex, &word, FUTEX_WAIT, expected, &wait, nullptr, 0) == 0 || errno != EINTR;
}

void futex_wake_all(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace pycollective
