// The verifier: proves that a schedule does what its collective promises.
//
// It plays all ranks symbolically. A chunk's value is the set of ranks whose contribution it holds,
// so "each contribution exactly once" is a property of sets. It rejects
//   * a result that misses or doubles a contribution, or stands in the wrong chunk,
//   * a send without its receive, or the other way round, or with another number of chunks,
//   * a deadlock when each ordered pair of ranks can hold one unreceived message,
//   * a write to a chunk that a peer may still be reading: the matching receive must happen before
//   the
//     write by the order of messages alone (vector clocks; Lamport 1978, Mattern 1989),
//   * reads of what was never written, writes to the input, a chunk put where another one belongs,
//     wrong `completes` marks.
// An array that is shorter than the number of chunks leaves the last ones empty, and nothing is
// sent for them: `filled` plays that. Up to 64 ranks sets are exact and clocks are kept; beyond, a
// set is the sum of random 64-bit numbers, one for each rank, and races are not looked for.
#pragma once

#include <string>
#include <vector>

#include "schedule/step.h"

namespace pycollective {

struct Schedule {
  Collective collective = Collective::all_reduce;
  int chunks = 1;
  std::vector<std::vector<Step>> steps;  // by rank; the root is rank 0
  int scratch = 0;                       // chunks of scratch of each rank
};

Schedule make_schedule(const Algorithm& algorithm, int size);

// The first thing that is wrong, or an empty string. In place: see can_be_in_place(). Only the
// first `filled` chunks hold anything, unless it is 0 or chunks are ranks' parts.
std::string verify(const Schedule& schedule, bool in_place, int filled = 0);

// verify() out of place and in place, for every number of filled chunks.
std::string prove(const Schedule& schedule);

// Marks the reductions that complete a chunk, as far as the schedule can be played.
void mark_complete(Schedule& schedule);

}  // namespace pycollective
