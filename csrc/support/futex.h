// Sleep until a word in (possibly shared) memory changes. Linux has a system call for it. On other
// systems futex_portable.cc sleeps for short intervals, which is correct but wakes up later.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace pycollective {

// Returns when `word` differs from `expected`, after `limit`, or spuriously. Returns false if a
// signal ended the sleep.
bool futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected,
                std::chrono::nanoseconds limit);

void futex_wake_all(std::atomic<std::uint32_t>& word);

}  // namespace pycollective
