// Dissemination barrier (Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization",
// 1988). In round j rank r signals rank r + 2^j and waits for rank r - 2^j.
//
// Cost: ceil(log2 size) rounds of empty messages.
#include "algorithms/algorithms.h"
#include "algorithms/function_algorithm.h"

namespace pycollective {
namespace {

Steps dissemination(int rank, int size) {
  for (int distance = 1; distance < size; distance *= 2) {
    co_yield send((rank + distance) % size, input(0, 0));
    co_yield recv((rank + size - distance) % size, output(0, 0));
  }
}

}  // namespace

const Algorithm& dissemination_barrier() {
  return algorithm<dissemination>("dissemination", Collective::barrier, one_chunk);
}

}  // namespace pycollective
