// Python's interpreter lock, let go of for the length of a block.
//
// A thread that wants the lock back and finds it taken is put to sleep by Python, and waking it
// takes tens of microseconds: long for replicas that are threads, which pass the lock to and fro in
// every short collective and between the kernels of a layer. So the threads of this package tell
// each other when they let go of it, and one that wants it back looks out for that for a short time
// first.
#pragma once

#include <pybind11/pybind11.h>

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
  PyThreadState* state_;
};

}  // namespace pycollective
