// Direct (pairwise) all-to-all (Thakur, Rabenseifner and Gropp, 2005). In turn t = 1 … size-1, rank
// r sends to rank r + t and receives from rank r - t. Each rank receives from one rank per turn.
//
// Cost: size - 1 turns; each rank sends size - 1 parts, the minimum.
#include "algorithms/algorithms.h"
#include "algorithms/function_algorithm.h"

namespace pycollective {
namespace {

Steps direct(int rank, int size) {
  co_yield copy(input(rank), output(rank));
  for (int turn = 1; turn < size; ++turn) {
    int to = (rank + turn) % size, from = (rank + size - turn) % size;
    co_yield send(to, input(to));
    co_yield recv(from, output(from));
  }
}

}  // namespace

const Algorithm& direct_all_to_all() {
  return algorithm<direct>("direct", Collective::all_to_all, chunk_for_each_rank);
}

}  // namespace pycollective
