// Translates C++ exceptions to Python's, and raises Ctrl-C in waiting ranks.
#pragma once

#include "executor/communicator.h"
#include "support/failure.h"

namespace pycollective {

// Sets the Python error for the current exception. Called in a catch block, with the GIL.
void set_python_error() noexcept;

void set_python_error(const Failure& failure);

Clock::duration duration_of(double seconds);
Clock::time_point deadline_in(double seconds);

// Runs Python's signal handlers. Throws if one of them raises.
void check_signals();

// Returns the arguments of a wait of this number of seconds, which `interrupt` may end by throwing.
Waiting waiting_for(double seconds, Interrupt interrupt = check_signals);

}  // namespace pycollective
