// Python's interpreter lock, let go of for the length of a block.
//
// A thread that wants the lock back and finds it taken is put to sleep by Python, and waking it
// takes tens of microseconds: long for replicas that are threads, which pass the lock to and fro in
// every short collective and between the kernels of a layer. So the threads of this package tell
// each other when they let go of it, and one that wants it back looks out for that for a short time
// first.
//
// When the interpreter ends, a thread that asks for the lock would be ended by Python in the middle
// of this code, which ends the process with an abort. So from then on such threads do not come
// back.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

namespace pycollective {

class InterpreterRelease {
 public:
  // With `keep` the lock is kept: what takes a few microseconds is over before anybody else could
  // use it, and getting it back may take longer.
  explicit InterpreterRelease(bool keep = false);
  ~InterpreterRelease();
  InterpreterRelease(const InterpreterRelease&) = delete;
  InterpreterRelease& operator=(const InterpreterRelease&) = delete;

 private:
  void restore();

  PyThreadState* state_;
};

// Python's interpreter lock, for the length of a block, for a thread that has let go of it.
class InterpreterLock {
 public:
  InterpreterLock();

 private:
  std::optional<pybind11::gil_scoped_acquire> acquire_;
};

// Each extension module calls this first when it is imported. The first call of the process has the
// end of the interpreter watched; all modules share what it makes.
void share_interpreter_lock();

}  // namespace pycollective
