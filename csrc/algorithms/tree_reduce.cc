// Binomial tree reduce, the binomial broadcast in reverse. In round j, the ranks whose lowest set
// bit is bit j send. Such a rank r sends the sum of ranks r … r + 2^j - 1 to rank r - 2^j.
//
// Cost: ceil(log2 size) rounds; every rank but the root sends the buffer once. Only the root has an
// output: other ranks add in one chunk of scratch.
#include "algorithms/algorithms.h"
#include "algorithms/function_algorithm.h"

namespace pycollective {
namespace {

Steps tree(int rank, int size) {
  if (size == 1) co_yield copy(input(0), output(0));
  Chunks so_far = input(0), sum = rank == 0 ? output(0) : scratch(0);
  for (int distance = 1; !(rank & distance) && rank + distance < size; distance *= 2) {
    co_yield recv_reduce(rank + distance, so_far, sum,
                         /*completes=*/rank == 0 && 2 * distance >= size);
    so_far = sum;
  }
  if (rank != 0) co_yield send(rank & (rank - 1), so_far);
}

}  // namespace

const Algorithm& tree_reduce() {
  return algorithm<tree>("tree", Collective::reduce, one_chunk, /*scratch=*/one_chunk);
}

}  // namespace pycollective
