// Ring all-gather, the second half of the ring all-reduce. In turn t = 0 … size-2, rank r sends
// part r - t to rank r + 1 and receives part r - t - 1 from rank r - 1.
//
// Cost: size - 1 turns; each rank sends size - 1 parts, the minimum.
#include "algorithms/algorithms.h"
#include "algorithms/function_algorithm.h"

namespace pycollective {
namespace {

Steps ring(int rank, int size) {
  co_yield copy(input(0), output(rank));
  int next = (rank + 1) % size, previous = (rank + size - 1) % size, part = rank;
  for (int turn = 0; turn < size - 1; ++turn) {
    co_yield send(next, output(part));
    part = (part + size - 1) % size;
    co_yield recv(previous, output(part));
  }
}

}  // namespace

const Algorithm& ring_all_gather() {
  return algorithm<ring>("ring", Collective::all_gather, chunk_for_each_rank);
}

}  // namespace pycollective
