// Direct gather: every rank sends its part to the root, which receives the parts in rank order.
//
// Cost: size - 1 messages at the root; each part moves once.
#include "algorithms/algorithms.h"
#include "algorithms/function_algorithm.h"

namespace pycollective {
namespace {

Steps direct(int rank, int size) {
  if (rank != 0) {
    co_yield send(0, input(0));
    co_return;
  }
  co_yield copy(input(0), output(0));
  for (int from = 1; from < size; ++from) co_yield recv(from, output(from));
}

}  // namespace

const Algorithm& direct_gather() {
  return algorithm<direct>("direct", Collective::gather, chunk_for_each_rank);
}

}  // namespace pycollective
