// Recursive doubling all-gather for any number of ranks (Bruck, Ho, Kipnis, Upfal and Weathersby,
// 1997, "Efficient algorithms for all-to-all communications in multiport message-passing systems").
// Before round j = 0 … ceil(log2 size) - 1, rank r has the parts of the 2^j ranks from r on. It
// sends them (in the last round, only the missing ones) to rank r - 2^j, and receives the parts
// from r + 2^j on.
//
// Cost: ceil(log2 size) rounds of one message; each rank sends size - 1 parts, the minimum.
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
