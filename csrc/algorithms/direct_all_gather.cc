// Direct all-gather: every rank sends its part to all other ranks, beginning with the next rank.
//
// Cost: one round of size - 1 messages; each rank sends size - 1 parts, the minimum.
#include "algorithms/algorithms.h"
#include "algorithms/function_algorithm.h"

namespace pycollective {
namespace {

Steps direct(int rank, int size) {
  co_yield copy(input(0), output(rank));
  for (int turn = 1; turn < size; ++turn) co_yield send((rank + turn) % size, output(rank));
  for (int turn = 1; turn < size; ++turn) {
    int from = (rank + size - turn) % size;
    co_yield recv(from, output(from));
  }
}

}  // namespace

const Algorithm& direct_all_gather() {
  return algorithm<direct>("direct", Collective::all_gather, chunk_for_each_rank);
}

}  // namespace pycollective
