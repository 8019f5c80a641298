// Direct reduce: every rank sends its buffer to the root, which combines the buffers in rank order,
// beginning with its own.
//
// Cost: size - 1 messages at the root, in one round.
//
// Ranks that share a board do the same without messages: executor/direct.h.
#include "algorithms/algorithms.h"
#include "algorithms/function_algorithm.h"

namespace pycollective {
namespace {

Steps direct(int rank, int size) {
  if (rank != 0) {
    co_yield send(0, input(0));
    co_return;
  }
  if (size == 1) co_yield copy(input(0), output(0));
  for (int from = 1; from < size; ++from) {
    co_yield recv_reduce(from, from == 1 ? input(0) : output(0), output(0),
                         /*completes=*/from == size - 1);
  }
}

}  // namespace

const Algorithm& direct_reduce() {
  return algorithm<direct>("direct", Collective::reduce, one_chunk);
}

}  // namespace pycollective
