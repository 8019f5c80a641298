// Recursive doubling all-gather for any number of ranks (Bruck, Ho, Kipnis, Upfal and Weathersby,
// "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997):
// before round j = 0 … ceil(log2 size) - 1, rank r has the 2^j parts from r on; it sends all of
// them, or as many as are wanting, to rank r - 2^j, and gets those from r + 2^j on.
//
// Cost: ceil(log2 size) rounds of one message; each rank sends size - 1 parts, the least possible.
#include <algorithm>

#include "algorithms/algorithms.h"
#include "algorithms/function_algorithm.h"

namespace pycollective {
namespace {

Steps doubling(int rank, int size) {
  co_yield copy(input(0), output(rank));
  for (int held = 1; held < size; held *= 2) {
    int parts = std::min(held, size - held), from = (rank + held) % size;
    co_yield send((rank + size - held) % size, output(rank, parts));
    co_yield recv(from, output(from, parts));
  }
}

}  // namespace

const Algorithm& doubling_all_gather() {
  return algorithm<doubling>("doubling", Collective::all_gather, chunk_for_each_rank);
}

}  // namespace pycollective
