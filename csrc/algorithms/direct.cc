// Direct (all-to-all) all-reduce: every rank exchanges messages with every other rank at once.
//
// The buffer has as many chunks as there are ranks, and rank i owns chunk i.
//   Scatter: Every rank sends chunk i to its owner, beginning with the next rank's chunk.
//   Reduce:  The owner combines all contributions, its own included, in rank order, so that the
//            bits of a result depend on the contributions alone.
//   Gather:  The owner sends the sum to every rank.
// Cost: two rounds of size - 1 messages each. Each rank sends 2 (size - 1) / size of the buffer,
// the minimum.
//
// Ranks that share a board do the same without messages: executor/direct.h.
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
  // In place, the output still is the input, so the partial sum is in scratch.
  Chunks so_far = scratch(rank);
  for (int from = 0; from < size; ++from) {
    bool last = from == size - 1;
    if (from == rank) {  // rank 0 has no partial sum yet to add its own part to
      if (rank > 0) co_yield reduce(input(rank), so_far, /*completes=*/last);
    } else if (from == 0) {
      co_yield recv(0, so_far);
    } else {
      Chunks before = rank == 0 && from == 1 ? input(0) : so_far;
      co_yield recv_reduce(from, before, last ? output(rank) : so_far, /*completes=*/last);
    }
  }
  if (size > 1 && rank == size - 1) co_yield copy(so_far, output(rank));
  for (int turn = 1; turn < size; ++turn) co_yield send((rank + turn) % size, output(rank));
  for (int from = 0; from < size; ++from) {
    if (from != rank) co_yield recv(from, output(from));
  }
}

int num_scratch(int size) { return size == 1 ? 0 : size; }

}  // namespace

const Algorithm& direct_all_reduce() {
  return algorithm<direct>("direct", Collective::all_reduce, chunk_for_each_rank, num_scratch);
}

}  // namespace pycollective
