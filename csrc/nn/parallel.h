// Runs a kernel on several cores.
#pragma once

#include <functional>

#include "nn/window.h"

namespace pycollective::nn {

// Returns the first of `count` items that belongs to part `part`.
inline Index begin_of_part(Index count, Index part, Index parts) { return count * part / parts; }

// The number of threads of a kernel, and of the parts into which it divides its work. The default
// is the number of usable cores, or OMP_NUM_THREADS if that is smaller.
int threads();
void set_threads(int count);

// Calls body(0), ..., body(parts - 1), partly in other threads, and returns when all calls have
// returned. All callers share the threads: a caller that finds them busy does all parts itself.
// Throws the first exception of `body`; later parts are then skipped.
void in_parallel(int parts, const std::function<void(int)>& body);

// Calls body(first, last) for each part of `count` pieces of work, with as many parts as threads.
void in_parts(Index count, const std::function<void(Index, Index)>& body);
// The same for work of this number of multiplications, with at most one part for each million:
// waking a thread takes about as long.
void in_parts(Index count, Index products, const std::function<void(Index, Index)>& body);

}  // namespace pycollective::nn
