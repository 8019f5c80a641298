// The verifier proves that a schedule fulfils its collective's contract.
//
// The verifier executes all ranks symbolically. A chunk's value is the set of ranks whose
// contributions it holds, so that "each contribution exactly once" is a property of sets. Errors
// are:
//   Results:   A contribution is missing or repeated, or a chunk is at another chunk's index. In an
//              all-reduce, ranks add a chunk's contributions in different orders.
//   Messages:  A send or a receive has no partner, or the numbers of chunks differ.
//   Deadlocks: Ranks wait for each other when each ordered pair can hold one unreceived message.
//   Races:     A write to a chunk that a peer may still read. Messages must order the matching
//              receive before the write (vector clocks; Lamport 1978, Mattern 1989).
//   Accesses:  A read of unwritten chunks, or a write to the input.
//   Marks:     A wrong `completes`.
// If an array has fewer items than there are chunks, the last chunks are empty and their messages
// are not sent; `filled` simulates that.
//
// These checks are for up to 64 ranks. For more ranks, random fingerprints replace the sets
// (fingerprints.cc), and steps are generated one at a time. Only those races are found that occur
// in the one order in which the ranks are executed. The order of additions is not checked.
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

// Yields a rank's row of the table. The table must outlive the coroutine.
Steps steps_of(const Schedule& schedule, int rank);

inline constexpr std::size_t kExactRanks = 64;

// An algorithm view of a table that is not proved yet.
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

// The numbers of chunks of the ranks' buffers. Every step must fit them.
struct Shape {
  // Throws std::invalid_argument for an empty group or schedule.
  Shape(Collective collective, int chunks, int scratch, int size);
  int chunks_of(int rank, Buffer buffer) const {
    return (rank == 0 ? root : others)[static_cast<std::size_t>(buffer)];
  }

  Collective collective;
  bool parts, reduces;
  int chunks, scratch, size;
  std::array<int, 3> root, others;  // by buffer
};
// The reason why a step does not fit: its first wrong property.
enum class Misfit : std::uint8_t {
  none,
  source,
  target,
  pieces,
  lengths,
  overlap,
  peer,
  reduces,
  completes
};
Misfit find_misfit(const Step& step, int rank, const Shape& shape);
std::string explain(Misfit misfit, const Step& step, int rank, const Shape& shape);
// Returns the description of a schedule's first misfit, or an empty string.
std::string misfit(const Schedule& schedule);

Schedule make_schedule(const Algorithm& algorithm, int size);

// Returns the description of the first error, or an empty string. In place: see can_be_in_place().
// Only the first `filled` chunks have data. All chunks have data if `filled` is 0, or if chunks are
// ranks' parts. For more than 64 ranks: checks out of place and in place at once, with all chunks
// filled.
std::string verify(const Schedule& schedule, bool in_place, int filled = 0);

// Runs verify() out of place and in place, for every number of filled chunks.
std::string prove(const Schedule& schedule, const Watch& watch = {});

// Verifies any number of ranks, out of place and in place at once. Needs 8 bytes of memory for each
// chunk of each rank's output and scratch.
enum class Marks { checked, ignored };
std::string verify_by_fingerprints(const Algorithm& algorithm, int size, Marks marks,
                                   const Watch& watch = {});
// Returns the reductions that complete a chunk, as pairs of rank and step.
std::vector<std::pair<int, std::size_t>> complete_by_fingerprints(const Algorithm& algorithm,
                                                                  int size);

// Marks the reductions that complete a chunk, up to the first error of the schedule.
void mark_complete(Schedule& schedule);

}  // namespace pycollective
