// Reduce-to-one-device all-reduce: the root adds every rank's buffer to its own in rank order, then
// sends the sum to every rank. It suits few ranks and small buffers.
//
// Cost: 2 (size - 1) consecutive messages at the root; the root moves 2 (size - 1) times the
// buffer, every other rank twice the buffer.
#include "algorithms/algorithms.h"
#include "algorithms/function_algorithm.h"

namespace pycollective {
namespace {

Steps reduce_to_one(int rank, int size) {
  if (rank != 0) {
    co_yield send(0, input(0));
    co_yield recv(0, output(0));
    co_return;
  }
  if (size == 1) co_yield copy(input(0), output(0));
  for (int from = 1; from < size; ++from) {
    co_yield recv_reduce(from, from == 1 ? input(0) : output(0), output(0),
                         /*completes=*/from == size - 1);
  }
  for (int to = 1; to < size; ++to) co_yield send(to, output(0));
}

}  // namespace

const Algorithm& reduce_to_one_all_reduce() {
  return algorithm<reduce_to_one>("reduce_to_one", Collective::all_reduce, one_chunk);
}

}  // namespace pycollective
