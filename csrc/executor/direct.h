// The direct all-reduce of ranks that share a board: what the schedule "direct" does, without
// messages. Both combine the contributions to an element in the order of the ranks, and give the
// same bits; only halves are rounded once here, unless the call is to be reproducible.
// benchmarks/executor_overhead.py and compare.py measure it.
//
//   one shot  short arrays: everyone posts its array and combines all of them itself.
//   mapped    everyone reaches everyone's arrays: rank r combines chunk r of all inputs, and writes
//             it to all outputs.
//   staged    otherwise: rank r copies chunk q into its staging for rank q, which combines what all
//             have staged for it into its own staging, from where all copy it; in blocks, so that
//             the three are under way at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "reduce/reduce.h"
#include "transport/board.h"
#include "transport/transport.h"

namespace pycollective {

// One rank's part of such a call, which must not be empty.
struct DirectCall {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;  // may be the input
  std::size_t count = 0;
  std::size_t item = 1;
  DType dtype = DType::f32;
  Op op = Op::sum;
  const Reduction* reduction = nullptr;  // of both
  // Whether halves are rounded once, after all contributions, and not after each: better, but not
  // what ranks can do that send each other messages.
  bool fused = true;
};

// Combines all ranks' arrays, in one pass over memory.
void combine_all(const DirectCall& call, void* const* targets, std::size_t num_targets,
                 const void* const* sources, int size, std::size_t count);

class DirectAllReduce {
 public:
  // Posts this rank's note; the endpoint has entered the call.
  DirectAllReduce(Endpoint& endpoint, const DirectCall& call);

  // Does what can be done without waiting, or some megabytes of it.
  Progress advance();
  // The ranks without which it does not go on.
  [[gnu::cold]] std::vector<int> awaited() const;

 private:
  enum class Mode { alone, undecided, one_shot, mapped, mapped_written, staged };

  // A block of the staged way, of which all ranks have the same idea.
  struct Block {
    std::size_t begin = 0;                      // its first byte in the arrays
    std::size_t bytes = 0;                      // 0: there are no more blocks
    std::size_t chunk = 0;                      // bytes of a chunk; the last ones may be shorter
    std::size_t stride = 0;                     // from one chunk to the next in staging
    std::uint64_t input_at = 0, input_end = 0;  // its places in the input and output staging
    std::uint64_t output_at = 0, output_end = 0;
  };
  struct Span {
    std::size_t offset, bytes;
  };

  bool all_have_come();
  void reduce_one_shot();
  std::byte* shot(int rank) const;  // where a rank's array lies, if not in its note
  bool reduce_mapped();             // a piece; whether it was the last
  Progress advance_staged();
  bool try_stage();
  bool try_reduce();
  bool try_take();
  void lay_out(Block& block) const;
  static std::size_t staged_place(int rank, int peer, const Block& block);
  void go_on(Block& block) const;  // to the next one
  Span chunk_of(const Block& block, int rank) const;
  void combine(void* const* targets, std::size_t num_targets, const void* const* sources,
               std::size_t bytes) const;
  // Peers whose counter has not reached a position.
  [[gnu::cold]] std::vector<int> behind(std::atomic<std::uint64_t> Board::Counters::* counter,
                                        std::uint64_t position) const;
  // Whether all peers' counters have reached a position. `seen`: how far they were known to be.
  bool reached(std::atomic<std::uint64_t> Board::Counters::* counter, std::uint64_t position,
               std::uint64_t& seen) const;

  Endpoint& endpoint_;
  Board& board_;
  DirectCall call_;
  std::size_t bytes_;
  std::uint64_t turn_;
  std::uint64_t fingerprint_;
  Mode mode_ = Mode::undecided;
  int come_ = 0;  // ranks whose notes are known to be there
  bool mappable_ = false;
  std::size_t mapped_ = 0;  // bytes of this rank's chunk that are combined
  Block staging_, reducing_, taking_;
  std::uint64_t seen_staged_ = 0, seen_reduced_ = 0, seen_taken_ = 0, seen_finished_ = 0;
  int staged_ahead_ = 0,
      reduced_ahead_ = 0;  // blocks staged but not reduced, reduced but not taken
};

}  // namespace pycollective
