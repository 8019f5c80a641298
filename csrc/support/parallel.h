// Runs a kernel, or a reduction, on several cores.
#pragma once

#include <cstdint>
#include <functional>

namespace pycollective {

// Returns the first of `count` items that belongs to part `part`.
inline std::int64_t begin_of_part(std::int64_t count, std::int64_t part, std::int64_t parts) {
  return count * part / parts;
}

// The number of threads of a kernel, and of the parts into which it divides its work. The default
// is the number of usable cores, or OMP_NUM_THREADS if that is smaller.
int threads();
void set_threads(int count);

// Calls body(0), ..., body(parts - 1), partly in other threads, and returns when all calls have
// returned. All callers share the threads: a caller that finds them busy does all parts itself.
// Throws the first exception of `body`; later parts are then skipped.
void in_parallel(int parts, const std::function<void(int)>& body);

// Calls body(first, last) for each part of `count` pieces of work, with as many parts as threads.
void in_parts(std::int64_t count, const std::function<void(std::int64_t, std::int64_t)>& body);
// The same for work of this number of multiplications, with at most one part for each million:
// waking a thread takes about as long.
void in_parts(std::int64_t count, std::int64_t products,
              const std::function<void(std::int64_t, std::int64_t)>& body);

}  // namespace pycollective
