#include "support/interpreter_release.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>

#include "support/cores.h"
#include "support/tuning.h"
#include "support/waiter.h"

namespace pycollective {
namespace {

// The state that the package's extension modules share, so that a thread in one module can pass the
// GIL to a thread in another.
struct Handover {
  // True if a thread of this package released the GIL and no other thread of this package has
  // claimed it since. Only a hint: other Python threads acquire and release the GIL without
  // updating it.
  std::atomic<bool> free{false};

  // Threads that spin until the GIL is free.
  std::atomic<int> spinning{0};

  // True when the interpreter ends; the thread that ends it.
  std::atomic<bool> ending{false};
  std::atomic<std::thread::id> ender;
  // Threads in a request for the GIL that began before the end of the interpreter.
  std::atomic<int> requests{0};
};

// Set when the module is imported. Never freed, because threads may still use it when the process
// ends.
Handover* handover = nullptr;

// An upper bound of the size of a thread's state in all versions of CPython.
constexpr std::size_t kThreadStateBytes = 64 * 1024;

// The yields of this thread while it waits for a free GIL.
[[maybe_unused]] thread_local int yields = kLockYields;

// Claims a free GIL. Returns false if the GIL is not free.
[[maybe_unused]] bool claim() {
  return handover->free.load(std::memory_order_relaxed) &&
         handover->free.exchange(false, std::memory_order_acquire);
}

// A request for the GIL. After the end of the interpreter, the constructor never returns.
class GilRequest {
 public:
  GilRequest() {
    handover->requests.fetch_add(1);
    if (!handover->ending.load() || handover->ender.load() == std::this_thread::get_id()) return;
    handover->requests.fetch_sub(1);
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));  // until the process ends
  }
  ~GilRequest() { handover->requests.fetch_sub(1); }
};

using Reference = std::unique_ptr<PyObject, decltype(&Py_DecRef)>;

Reference checked(PyObject* made) {
  if (!made)
    throw std::runtime_error("pycollective could not share its state with the interpreter");
  return {made, &Py_DecRef};
}

// Lets the threads that already wait for the GIL acquire it. Waits at most a second for them.
PyObject* end_interpreter(PyObject*, PyObject*) {
  handover->ender.store(std::this_thread::get_id());
  handover->ending.store(true);
  PyThreadState* state = PyEval_SaveThread();
  auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  while (handover->requests.load() > 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  PyEval_RestoreThread(state);
  Py_RETURN_NONE;
}

PyMethodDef end_method{"end_interpreter", end_interpreter, METH_NOARGS, nullptr};

}  // namespace

InterpreterLock::InterpreterLock() {
  // CPython does not check the allocation of a new thread's state: fail here instead.
  if (!PyGILState_GetThisThreadState()) ::operator delete(::operator new(kThreadStateBytes));
  GilRequest request;
  state_ = PyGILState_Ensure();
}

InterpreterRelease::InterpreterRelease(bool keep) : state_(keep ? nullptr : PyEval_SaveThread()) {
#ifndef Py_GIL_DISABLED
  if (!keep) handover->free.store(true, std::memory_order_release);
#endif
}

InterpreterRelease::~InterpreterRelease() {
  if (!state_) return;
#ifndef Py_GIL_DISABLED
  if (!claim()) {
    // Spinning steals time from the thread that holds the GIL, unless that thread has its own core.
    const bool no_core_left = has_more_than_cores(handover->spinning.fetch_add(1) + 2);
    const int spins = no_core_left ? kOversubscribedSpins : kLockSpins;
    const bool claimed = spin_until({spins, yields}, claim);
    handover->spinning.fetch_sub(1);
    if (!claimed) {
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
  GilRequest request;
  PyEval_RestoreThread(state_);
}

bool interpreter_is_ending() { return handover->ending.load(); }

void share_interpreter_lock() {
  constexpr auto kName = "pycollective.interpreter_lock";
  PyObject* shared = PyInterpreterState_GetDict(PyInterpreterState_Get());
  if (!shared) checked(nullptr);
  if (PyObject* found = PyDict_GetItemString(shared, kName)) {
    handover = static_cast<Handover*>(PyCapsule_GetPointer(found, kName));
    return;  // another module of the package was imported first
  }
  handover = new Handover;
  const Reference capsule = checked(PyCapsule_New(handover, kName, nullptr));
  const Reference name = checked(PyUnicode_FromString(kName));
  if (PyDict_SetItem(shared, name.get(), capsule.get()) < 0) checked(nullptr);
  pthread_atfork(nullptr, nullptr,
                 [] { handover->requests.store(0); });  // the child has one thread
  // atexit calls the last registered function first: this one runs after all others of the package.
  const Reference atexit = checked(PyImport_ImportModule("atexit"));
  const Reference end = checked(PyCFunction_New(&end_method, nullptr));
  checked(PyObject_CallMethod(atexit.get(), "register", "O", end.get()));
}

}  // namespace pycollective
