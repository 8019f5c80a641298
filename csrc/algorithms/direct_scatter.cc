// Direct scatter: the root sends every rank its part, in rank order.
//
// Cost: size - 1 messages at the root; each part moves once.
#include "algorithms/algorithms.h"
#include "algorithms/function_algorithm.h"

namespace pycollective {
namespace {

Steps direct(int rank, int size) {
  if (rank != 0) {
    co_yield recv(0, output(0));
    co_return;
  }
  for (int to = 1; to < size; ++to) co_yield send(to, input(to));
  co_yield copy(input(0), output(0));
}

}  // namespace

const Algorithm& direct_scatter() {
  return algorithm<direct>("direct", Collective::scatter, chunk_for_each_rank);
}

}  // namespace pycollective
