// Ring all-reduce (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", 2009).
//
// Rank r receives from rank r - 1 and sends to rank r + 1. The buffer has as many chunks as there
// are ranks.
//   Reduce-scatter, turn t = 0 … size-2: Send chunk r - t. Add the received data to chunk
//                   r - t - 1. Afterwards rank r holds the whole sum of chunk r + 1.
//   All-gather,     turn t = 0 … size-2: Send chunk r + 1 - t, receive chunk r - t.
// Cost: 2 (size - 1) turns; each rank sends 2 (size - 1) / size of the buffer, the minimum.
#include "algorithms/algorithms.h"
#include "algorithms/function_algorithm.h"

namespace pycollective {
namespace {

Steps ring(int rank, int size) {
  if (size == 1) co_yield copy(input(0), output(0));
  int next = (rank + 1) % size, previous = (rank + size - 1) % size, c = rank;
  for (int turn = 0; turn < size - 1; ++turn) {
    co_yield send(next, turn == 0 ? input(c) : output(c));
    c = (c + size - 1) % size;
    co_yield recv_reduce(previous, input(c), output(c), /*completes=*/turn == size - 2);
  }
  for (int turn = 0; turn < size - 1; ++turn) {
    co_yield send(next, output(c));
    c = (c + size - 1) % size;
    co_yield recv(previous, output(c));
  }
}

}  // namespace

const Algorithm& ring_all_reduce() {
  return algorithm<ring>("ring", Collective::all_reduce, chunk_for_each_rank);
}

}  // namespace pycollective
