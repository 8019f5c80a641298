// The process that created an object. A forked child has copies of its parent's objects. Before
// code frees a resource, closes it, or notifies other processes, it checks the object's Origin.
#pragma once

#include <pthread.h>

#include <atomic>

namespace pycollective {

class Origin {
 public:
  // Returns true in the process that created the object.
  bool is_here() const { return generation_ == generations().load(std::memory_order_relaxed); }

 private:
  // The number of forks between the first process and this one. Unlike a process id, it is never
  // reused.
  static std::atomic<unsigned>& generations() {
    static std::atomic<unsigned> count{0};
    [[maybe_unused]] static const int registered =
        pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1, std::memory_order_relaxed); });
    return count;
  }

  unsigned generation_ = generations().load(std::memory_order_relaxed);
};

}  // namespace pycollective
