// Recursive halving reduce-scatter for any number of ranks: the recursive doubling all-gather
// (doubling_all_gather.cc) in reverse. The rounds are j = ceil(log2 size) - 1 … 0. In round j, rank
// r sends its partial sums for (at most) the 2^j ranks from r + 2^j on to rank r + 2^j. From
// rank r - 2^j it receives partial sums for the ranks from r on, and adds its own.
//
// Cost: ceil(log2 size) rounds of one message; each rank sends size - 1 parts, the minimum.
#include <bit>

#include "algorithms/algorithms.h"
#include "algorithms/function_algorithm.h"

namespace pycollective {
namespace {

// The distance between sender and receiver in the first round: the highest power of two below size.
int farthest(int size) { return static_cast<int>(std::bit_ceil(static_cast<unsigned>(size)) / 2); }

// Chunk i of scratch is the partial sum for rank r + i.
int num_scratch(int size) { return size > 2 ? farthest(size) : 0; }

Steps halving(int rank, int size) {
  if (size == 1) {
    co_yield copy(input(0), output(0));
    co_return;
  }
  auto after = [&](int distance) { return (rank + distance) % size; };
  int far = farthest(size), sums = size - far, untouched = far - sums;
  Chunks received = size == 2 ? output(0) : scratch(0, sums);
  co_yield send(after(far), input(after(far), sums));
  co_yield recv_reduce(after(sums), input(rank, sums), received, /*completes=*/size == 2);
  if (untouched > 0) {  // no sums arrived for these chunks: they begin with this rank's input
    co_yield copy(input(after(sums), untouched), scratch(sums, untouched));
  }
  for (int distance = far / 2; distance > 0; distance /= 2) {
    bool last = distance == 1;
    co_yield send(after(distance), scratch(distance, distance));
    co_yield recv_reduce(after(size - distance), scratch(0, distance),
                         last ? output(0) : scratch(0, distance), /*completes=*/last);
  }
}

}  // namespace

const Algorithm& halving_reduce_scatter() {
  return algorithm<halving>("halving", Collective::reduce_scatter, chunk_for_each_rank,
                            num_scratch);
}

}  // namespace pycollective
