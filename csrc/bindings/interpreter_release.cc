#include "bindings/interpreter_release.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "support/cores.h"
#include "support/tuning.h"
#include "support/waiter.h"

namespace pycollective {
namespace {

// Whether the last of our threads that had the lock has let go of it, and none has come for it
// since. Only a hint: Python's other threads take and leave the lock without a word here.
std::atomic<bool> vacant{false};

// Yields of this thread before it asks Python for the lock.
[[maybe_unused]] thread_local int yields = kLockYields;

// Threads that spin for the lock.
[[maybe_unused]] std::atomic<int> seekers{0};

// Whether it was vacant, and is now this thread's to ask for.
[[maybe_unused]] bool take() {
  return vacant.load(std::memory_order_relaxed) &&
         vacant.exchange(false, std::memory_order_acquire);
}

// The end of the interpreter ------------------------------------------------------------------

std::atomic<bool> ending{false};
std::atomic<std::thread::id> ender;
// Threads that ask for the lock, having seen that it is not the end.
std::atomic<int> asking{0};

// A thread that asks for the lock; it does not come back when the interpreter ends.
class Asking {
 public:
  Asking() {
    asking.fetch_add(1);
    if (!ending.load() || ender.load() == std::this_thread::get_id()) return;
    asking.fetch_sub(1);
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));  // until the process is gone
  }
  ~Asking() { asking.fetch_sub(1); }
};

// Those that are asking already get it: at most for a second, if Python's threads keep it so long.
void end_interpreter() {
  ender.store(std::this_thread::get_id());
  ending.store(true);
  PyThreadState* state = PyEval_SaveThread();
  auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  while (asking.load() > 0 && std::chrono::steady_clock::now() < patience) {
    std::this_thread::yield();
  }
  PyEval_RestoreThread(state);
}

}  // namespace

InterpreterLock::InterpreterLock() {
  Asking asks;
  acquire_.emplace();
}

InterpreterRelease::InterpreterRelease(bool keep) : state_(keep ? nullptr : PyEval_SaveThread()) {
#ifndef Py_GIL_DISABLED
  if (!keep) vacant.store(true, std::memory_order_release);
#endif
}

InterpreterRelease::~InterpreterRelease() {
  if (!state_) return;
#ifndef Py_GIL_DISABLED
  if (!take()) {
    // The holder needs a core of its own.
    const int spins = crowded(seekers.fetch_add(1) + 2) ? kCrowdedSpins : kLockSpins;
    const bool taken = spin_until({spins, yields}, take);
    seekers.fetch_sub(1);
    if (!taken) {
      const auto begin = std::chrono::steady_clock::now();
      restore();
      const bool was_free = std::chrono::steady_clock::now() - begin < kLockWasFree;
      yields = was_free ? std::max(kLeastLockYields, yields / 4) : kLockYields;
      return;
    }
    yields = kLockYields;
  }
#endif
  restore();
}

void InterpreterRelease::restore() {
  Asking asks;
  PyEval_RestoreThread(state_);
}

void watch_interpreter_end() {
  pthread_atfork(nullptr, nullptr, [] { asking.store(0); });  // the child has one thread
  // Registered before anything else of this package, it is called after all of that.
  pybind11::module_::import("atexit").attr("register")(pybind11::cpp_function(&end_interpreter));
}

}  // namespace pycollective
