// Direct reduce-scatter: every rank sends part i to rank i, beginning with the next rank's part.
// Rank i adds the received parts to its own part, in rank order.
//
// Cost: one round of size - 1 messages; each rank sends size - 1 parts, the minimum.
#include "algorithms/algorithms.h"
#include "algorithms/function_algorithm.h"

namespace pycollective {
namespace {

Steps direct(int rank, int size) {
  if (size == 1) co_yield copy(input(0), output(0));
  for (int turn = 1; turn < size; ++turn) {
    int to = (rank + turn) % size;
    co_yield send(to, input(to));
  }
  Chunks so_far = input(rank);
  int last = rank == size - 1 ? size - 2 : size - 1;
  for (int from = 0; from < size; ++from) {
    if (from == rank) continue;
    co_yield recv_reduce(from, so_far, output(0), /*completes=*/from == last);
    so_far = output(0);
  }
}

}  // namespace

const Algorithm& direct_reduce_scatter() {
  return algorithm<direct>("direct", Collective::reduce_scatter, chunk_for_each_rank);
}

}  // namespace pycollective
