#include "bindings/interpreter_release.h"

#include <atomic>
#include <thread>

#include "support/tuning.h"
#include "transport/wait.h"

namespace pycollective {
namespace {

// Whether the last of our threads that had the lock has let go of it, and none has come for it
// since. Only a hint: Python's other threads take and leave the lock without a word here.
std::atomic<bool> vacant{false};

// Threads that look out for it.
[[maybe_unused]] std::atomic<int> seekers{0};

// Whether it was vacant, and is now this thread's to ask for.
[[maybe_unused]] bool take() {
  return vacant.load(std::memory_order_relaxed) &&
         vacant.exchange(false, std::memory_order_acquire);
}

}  // namespace

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
    int looks = crowded(seekers.fetch_add(1) + 2) ? kCrowdedSpins : kLockLooks;
    bool taken = false;
    for (int i = 0; !taken && i < looks; ++i) {
      pause();
      taken = take();
    }
    for (int i = 0; !taken && i < kLockYields; ++i) {
      std::this_thread::yield();
      taken = take();
    }
    seekers.fetch_sub(1);
  }
#endif
  PyEval_RestoreThread(state_);
}

}  // namespace pycollective
