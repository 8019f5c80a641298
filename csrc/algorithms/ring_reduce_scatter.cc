// Ring reduce-scatter: in turn t = 0 … size-2, rank r sends the sum so far of part r - t - 1 to
// rank r + 1, and adds its own contribution to what arrives of part r - t - 2 (the first half of
// the ring all-reduce). The last sum is that of part r.
//
// Cost: size - 1 turns; each rank sends size - 1 parts, the least possible. The sums on their way
// stand in size - 2 chunks of scratch: nothing tells a rank early that its neighbour has read one.
#include "algorithms/algorithms.h"
#include "algorithms/function_algorithm.h"

namespace pycollective {
namespace {

Steps ring(int rank, int size) {
  if (size == 1) co_yield copy(input(0), output(0));
  int next = (rank + 1) % size, previous = (rank + size - 1) % size, part = previous;
  for (int turn = 0; turn < size - 1; ++turn) {
    bool last = turn == size - 2;
    co_yield send(next, turn == 0 ? input(part) : scratch(turn - 1));
    part = (part + size - 1) % size;
    co_yield recv_reduce(previous, input(part), last ? output(0) : scratch(turn),
                         /*completes=*/last);
  }
}

int num_scratch(int size) { return size > 2 ? size - 2 : 0; }

}  // namespace

const Algorithm& ring_reduce_scatter() {
  return algorithm<ring>("ring", Collective::reduce_scatter, chunk_for_each_rank, num_scratch);
}

}  // namespace pycollective
