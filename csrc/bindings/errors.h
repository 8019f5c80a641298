// C++ exceptions as Python's, and Python's Ctrl-C in waiting ranks.
#pragma once

#include "executor/communicator.h"
#include "support/failure.h"

namespace pycollective {

// Within a catch block, with the interpreter: sets the Python error that stands for the exception.
void set_python_error() noexcept;

void set_python_error(const Failure& failure);

// Waiting for so many seconds, or until a signal's handler raises.
Waiting waiting_for(double seconds);

}  // namespace pycollective
