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
// sent for them: `filled` plays that. All this to 64 ranks. Beyond, sets are random fingerprints
// (fingerprints.cc), steps are asked for one at a time, and of the races only those are found that
// show in the one order in which the ranks are played.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "schedule/step.h"
#include "schedule/walk.h"

namespace pycollective {

struct Schedule {
  Collective collective = Collective::all_reduce;
  int chunks = 1;
  std::vector<std::vector<Step>> steps;  // by rank; the root is rank 0
  int scratch = 0;                       // chunks of scratch of each rank
};

// A rank's row of the table, which must outlive the coroutine.
Steps steps_of(const Schedule& schedule, int rank);

inline constexpr std::size_t kExactRanks = 64;

// A table, not yet proved, read as an algorithm.
class ScheduleView final : public Algorithm {
 public:
  explicit ScheduleView(const Schedule& schedule) : schedule_(schedule) {}
  std::string_view name() const override { return "schedule"; }
  Collective collective() const override { return schedule_.collective; }
  int num_chunks(int) const override { return schedule_.chunks; }
  int num_scratch(int) const override { return schedule_.scratch; }
  Steps steps(int rank, int) const override { return steps_of(schedule_, rank); }

 private:
  const Schedule& schedule_;
};

// The chunks of the ranks' buffers, into which every step must fit.
struct Shape {
  // Throws std::invalid_argument when there is nothing to fit into.
  Shape(Collective collective, int chunks, int scratch, int size);
  int chunks_of(int rank, Buffer buffer) const {
    return (rank == 0 ? root : others)[static_cast<std::size_t>(buffer)];
  }

  Collective collective;
  bool parts, reduces;
  int chunks, scratch, size;
  std::array<int, 3> root, others;  // by buffer
};
// The reason why a step cannot be played: what is wrong about it.
enum class Misfit : std::uint8_t {
  none,
  source,
  target,
  pieces,
  lengths,
  peer,
  reduces,
  completes
};
Misfit find_misfit(const Step& step, int rank, const Shape& shape);
std::string explain(Misfit misfit, const Step& step, int rank, const Shape& shape);
// The first misfit of a schedule, or an empty string.
std::string misfit(const Schedule& schedule);

Schedule make_schedule(const Algorithm& algorithm, int size);

// The first thing that is wrong, or an empty string. In place: see can_be_in_place(). Only the
// first `filled` chunks hold anything, unless it is 0 or chunks are ranks' parts. Beyond 64 ranks:
// out of place and in place at once, all chunks filled.
std::string verify(const Schedule& schedule, bool in_place, int filled = 0);

// verify() out of place and in place, for every number of filled chunks.
std::string prove(const Schedule& schedule);

// Verifies any number of ranks, out of place and in place at once, in memory of 8 bytes for each
// chunk of each rank's output and scratch.
enum class Marks { checked, ignored };
std::string verify_by_fingerprints(const Algorithm& algorithm, int size, Marks marks,
                                   const Watch& watch = {});
// The reductions that complete a chunk: rank and step.
std::vector<std::pair<int, std::size_t>> complete_by_fingerprints(const Algorithm& algorithm,
                                                                  int size);

// Marks the reductions that complete a chunk, as far as the schedule can be played.
void mark_complete(Schedule& schedule);

}  // namespace pycollective
