// The process that an object belongs to. A forked child has a copy of all that its parent had, and
// acts for none of it: whatever frees, ends or tells something that other processes see asks its
// Origin first.
#pragma once

#include <pthread.h>

#include <atomic>

namespace pycollective {

class Origin {
 public:
  // Whether this is the process in which the object was made.
  bool is_here() const { return generation_ == generations().load(std::memory_order_relaxed); }

 private:
  // Forks between the first process and this one. Unlike a process's id it is never used again.
  static std::atomic<unsigned>& generations() {
    static std::atomic<unsigned> count{0};
    [[maybe_unused]] static const int registered =
        pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1, std::memory_order_relaxed); });
    return count;
  }

  unsigned generation_ = generations().load(std::memory_order_relaxed);
};

}  // namespace pycollective
