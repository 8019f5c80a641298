// Sleeping until a word in memory changes, which may be memory that processes share. futex_linux.cc
// uses the futex system call; elsewhere futex_portable.cc sleeps for short whiles, which is always
// right and only slower to wake.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace pycollective {

// Returns when `word` may no longer be `expected`, or after `limit`; may also return early. Returns
// false if a signal came.
bool futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected,
                std::chrono::nanoseconds limit);

void futex_wake_all(std::atomic<std::uint32_t>& word);

}  // namespace pycollective
