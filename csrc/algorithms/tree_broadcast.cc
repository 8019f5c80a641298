// Binomial tree broadcast: in round j the ranks below 2^j, which have the buffer, send it to the
// rank 2^j above them.
//
// Cost: ceil(log2 size) rounds; the root sends the buffer once in each round.
#include <bit>

#include "algorithms/algorithms.h"
#include "algorithms/function_algorithm.h"

namespace pycollective {
namespace {

Steps tree(int rank, int size) {
  int distance = 1;
  if (rank == 0) {
    co_yield copy(input(0), output(0));
  } else {
    distance = static_cast<int>(std::bit_floor(static_cast<unsigned>(rank)));
    co_yield recv(rank - distance, output(0));
    distance *= 2;
  }
  for (; rank + distance < size; distance *= 2) co_yield send(rank + distance, output(0));
}

}  // namespace

const Algorithm& tree_broadcast() {
  return algorithm<tree>("tree", Collective::broadcast, one_chunk);
}

}  // namespace pycollective
