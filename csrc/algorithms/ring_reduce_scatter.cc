// Ring reduce-scatter, the first half of the ring all-reduce. In turn t = 0 … size-2, rank r sends
// the partial sum of part r - t - 1 to rank r + 1. To the received partial sum of part r - t - 2 it
// adds its own contribution. The last sum is that of part r.
//
// Cost: size - 1 turns; each rank sends size - 1 parts, the minimum. Partial sums are in size - 2
// chunks of scratch: no message tells a rank early that the next rank has read one of them.
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
