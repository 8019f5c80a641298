// Releases Python's GIL for the length of a block.
//
// CPython puts a thread that waits for the GIL to sleep, and a wake-up takes tens of microseconds.
// Replicas that are threads would pay it in every short collective and between the kernels of a
// layer. The threads of this package therefore announce the release of the GIL to each other. A
// waiting thread spins for such an announcement before it asks CPython.
//
// CPython ends a thread that requests the GIL after the end of the interpreter. Inside C++ frames
// that aborts the process, so such threads block here instead.
#pragma once

#include <Python.h>

namespace pycollective {

class InterpreterRelease {
 public:
  // `keep`: do not release the GIL. For work of a few microseconds, which is shorter than getting
  // the GIL back.
  explicit InterpreterRelease(bool keep = false);
  ~InterpreterRelease();
  InterpreterRelease(const InterpreterRelease&) = delete;
  InterpreterRelease& operator=(const InterpreterRelease&) = delete;

 private:
  void restore();

  PyThreadState* state_;
};

// Holds Python's GIL for the length of a block, in a thread that does not have it.
class InterpreterLock {
 public:
  InterpreterLock();
  ~InterpreterLock() { PyGILState_Release(state_); }
  InterpreterLock(const InterpreterLock&) = delete;
  InterpreterLock& operator=(const InterpreterLock&) = delete;

 private:
  PyGILState_STATE state_;
};

// Returns True after the end of the interpreter has begun.
bool interpreter_is_ending();

// Each extension module calls this first when it is imported. The first call of the process creates
// the shared state and registers a handler for the end of the interpreter.
void share_interpreter_lock();

}  // namespace pycollective
