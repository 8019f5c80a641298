// Direct broadcast: the root sends its buffer to every rank, in rank order.
//
// Cost: size - 1 messages at the root; each rank receives the buffer once.
//
// Ranks that share a board do the same without messages: executor/direct.h.
#include "algorithms/algorithms.h"
#include "algorithms/function_algorithm.h"

namespace pycollective {
namespace {

Steps direct(int rank, int size) {
  if (rank != 0) {
    co_yield recv(0, output(0));
    co_return;
  }
  co_yield copy(input(0), output(0));
  for (int to = 1; to < size; ++to) co_yield send(to, output(0));
}

}  // namespace

const Algorithm& direct_broadcast() {
  return algorithm<direct>("direct", Collective::broadcast, one_chunk);
}

}  // namespace pycollective
