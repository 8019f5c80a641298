// C++ exceptions as Python's, and Python's Ctrl-C in waiting ranks.
#pragma once

#include "executor/communicator.h"
#include "support/failure.h"

namespace pycollective {

// Within a catch block, with the interpreter: sets the Python error that stands for the exception.
void set_python_error() noexcept;

void set_python_error(const Failure& failure);

Clock::duration duration_of(double seconds);
Clock::time_point deadline_in(double seconds);

// Raises what a signal's handler raises.
void look_at_signals();

// Waiting for so many seconds, or until `interrupt` throws.
Waiting waiting_for(double seconds, Interrupt interrupt = look_at_signals);

}  // namespace pycollective
