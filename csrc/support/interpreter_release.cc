#include "support/interpreter_release.h"

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

// The package's extension modules share one object of this type: a thread that is in one of them
// passes the lock to a thread that is in another.
struct Handover {
  // True if the last of our threads that had the lock has let go of it, and none has come for it
  // since. Only a hint: Python's other threads acquire and release the lock without a word here.
  std::atomic<bool> vacant{false};

  // Threads that spin until the lock is vacant.
  std::atomic<int> seekers{0};

  // The interpreter ends, and the thread that ends it.
  std::atomic<bool> ending{false};
  std::atomic<std::thread::id> ender;
  // Threads that ask for the lock, having seen that the interpreter does not end.
  std::atomic<int> asking{0};
};

// Set when the module is imported. Never freed: threads may still use it when the process ends.
Handover* handover = nullptr;

// More than a thread's state takes, in all versions of CPython.
constexpr std::size_t kThreadStateBytes = 64 * 1024;

// This thread yields so often while it waits until the lock is vacant.
[[maybe_unused]] thread_local int yields = kLockYields;

// Returns true if the lock was vacant, and is now this thread's to ask for.
[[maybe_unused]] bool take() {
  return handover->vacant.load(std::memory_order_relaxed) &&
         handover->vacant.exchange(false, std::memory_order_acquire);
}

// A thread that asks for the lock; it does not come back when the interpreter ends.
class Asking {
 public:
  Asking() {
    handover->asking.fetch_add(1);
    if (!handover->ending.load() || handover->ender.load() == std::this_thread::get_id()) return;
    handover->asking.fetch_sub(1);
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));  // until the process is gone
  }
  ~Asking() { handover->asking.fetch_sub(1); }
};

// Threads that ask for the lock already get it. This takes a second at most, if other threads keep
// the lock so long.
void end_interpreter() {
  handover->ender.store(std::this_thread::get_id());
  handover->ending.store(true);
  PyThreadState* state = PyEval_SaveThread();
  auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  while (handover->asking.load() > 0 && std::chrono::steady_clock::now() < patience) {
    std::this_thread::yield();
  }
  PyEval_RestoreThread(state);
}

}  // namespace

InterpreterLock::InterpreterLock() {
  // CPython does not check that there is memory for the state of a new thread.
  if (!PyGILState_GetThisThreadState()) ::operator delete(::operator new(kThreadStateBytes));
  Asking asks;
  acquire_.emplace();
}

InterpreterRelease::InterpreterRelease(bool keep) : state_(keep ? nullptr : PyEval_SaveThread()) {
#ifndef Py_GIL_DISABLED
  if (!keep) handover->vacant.store(true, std::memory_order_release);
#endif
}

InterpreterRelease::~InterpreterRelease() {
  if (!state_) return;
#ifndef Py_GIL_DISABLED
  if (!take()) {
    // The holder needs a core of its own.
    const bool no_core_left = crowded(handover->seekers.fetch_add(1) + 2);
    const int spins = no_core_left ? kCrowdedSpins : kLockSpins;
    const bool taken = spin_until({spins, yields}, take);
    handover->seekers.fetch_sub(1);
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

void share_interpreter_lock() {
  constexpr auto kName = "pycollective.interpreter_lock";
  handover = static_cast<Handover*>(pybind11::get_shared_data(kName));
  if (handover) return;  // another module of the package was imported first
  handover = new Handover;
  pybind11::set_shared_data(kName, handover);
  pthread_atfork(nullptr, nullptr, [] { handover->asking.store(0); });  // the child has one thread
  // Registered before anything else of this package, it is called after all of that.
  pybind11::module_::import("atexit").attr("register")(pybind11::cpp_function(&end_interpreter));
}

}  // namespace pycollective
