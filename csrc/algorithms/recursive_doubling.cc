// Recursive doubling all-reduce (Thakur, Rabenseifner and Gropp, 2005, "Optimization of collective
// communication operations in MPICH"), for short arrays.
//
// Let p be the largest power of two up to size. The buffer is one chunk.
//   Fold in:  Rank p + i sends its buffer to rank i, which adds it. Rank p + i then waits.
//   Doubling, round j = 0 … log2 p - 1: Ranks r and r XOR 2^j exchange the sums of 2^j ranks.
//             Both add the lower rank's sum first, so that the bits are the same on all ranks.
//   Fold out: Rank i sends the sum to rank p + i.
// Cost: log2 p rounds, in which each rank sends log2 p times the buffer. If size is not a power of
// two, two more rounds move the buffer.
//
// Each round has scratch of its own: nothing tells a rank that its partner has read the last sum.
#include <bit>

#include "algorithms/algorithms.h"
#include "algorithms/function_algorithm.h"

namespace pycollective {
namespace {

int rounds(int size) { return std::bit_width(static_cast<unsigned>(size)) - 1; }

Steps recursive_doubling(int rank, int size) {
  if (size == 1) co_yield copy(input(0), output(0));
  const int last = rounds(size), p = 1 << last;
  if (rank >= p) {
    co_yield send(rank - p, input(0));
    co_yield recv(rank - p, output(0));
    co_return;
  }
  const bool folds = rank + p < size;
  if (folds) {
    co_yield recv_reduce(rank + p, input(0), scratch(0), /*completes=*/false);
  } else if (size > 1) {
    co_yield copy(input(0), scratch(0));  // in place, the output replaces the input
  }
  for (int round = 0; round < last; ++round) {
    const int partner = rank ^ 1 << round;
    const bool completes = round + 1 == last;
    const Chunks sum = scratch(round), next = completes ? output(0) : scratch(round + 1);
    co_yield send(partner, sum);
    if (rank < partner) {
      co_yield recv_reduce(partner, sum, next, completes);
    } else {
      co_yield recv(partner, next);
      co_yield reduce(sum, next, completes);
    }
  }
  if (folds) co_yield send(rank + p, output(0));
}

}  // namespace

const Algorithm& recursive_doubling_all_reduce() {
  return algorithm<recursive_doubling>("recursive_doubling", Collective::all_reduce, one_chunk,
                                       rounds);
}

}  // namespace pycollective
