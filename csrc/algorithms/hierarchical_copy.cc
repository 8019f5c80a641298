// Hierarchical copy all-reduce, after TensorFlow's HierarchicalCopyAllReduce for two cliques of
// devices with slower links between them. This version works for every number of ranks.
//
// The ranks form two halves, 0 … h-1 and h … size-1 with h = ceil(size / 2). The buffer has as many
// chunks as there are ranks. Chunk i has one root in each half: member i mod (size of the half).
// The roots rotate, so that all ranks share the work equally.
//   Up:    Every member sends each chunk to the chunk's root in its half. The root adds the
//          members' chunks to its own chunk, in rank order.
//   Cross: For even i the second half's root sends its sum to the first half's root, which
//          returns the whole sum. For odd i the roles are swapped.
//   Down:  Each root sends the whole sum to its half.
// Each phase processes the chunks in order.
//
// Cost: each chunk crosses between the halves twice; each rank sends about twice the buffer.
#include "algorithms/algorithms.h"
#include "algorithms/function_algorithm.h"

namespace pycollective {
namespace {

Steps hierarchical_copy(int rank, int size) {
  if (size == 1) {
    co_yield copy(input(0), output(0));
    co_return;
  }
  int h = (size + 1) / 2;
  bool in_first = rank < h;
  int first = in_first ? 0 : h, end = in_first ? h : size, members = end - first;
  auto root = [&](int chunk) { return first + chunk % members; };

  for (int chunk = 0; chunk < size; ++chunk) {
    if (root(chunk) != rank) {
      co_yield send(root(chunk), input(chunk));
      continue;
    }
    Chunks so_far = input(chunk);
    for (int other = first; other < end; ++other) {
      if (other == rank) continue;
      co_yield recv_reduce(other, so_far, output(chunk), /*completes=*/false);
      so_far = output(chunk);
    }
  }
  for (int chunk = rank - first; chunk < size; chunk += members) {
    int partner = in_first ? h + chunk % (size - h) : chunk % h;
    // A half with one rank has no up phase: its sum is its input.
    Chunks sum = members == 1 ? input(chunk) : output(chunk);
    if (in_first == (chunk % 2 == 0)) {
      co_yield recv_reduce(partner, sum, output(chunk), /*completes=*/true);
      co_yield send(partner, output(chunk));
    } else {
      co_yield send(partner, sum);
      co_yield recv(partner, output(chunk));
    }
  }
  for (int chunk = 0; chunk < size; ++chunk) {
    if (root(chunk) != rank) {
      co_yield recv(root(chunk), output(chunk));
      continue;
    }
    for (int other = first; other < end; ++other) {
      if (other != rank) co_yield send(other, output(chunk));
    }
  }
}

}  // namespace

const Algorithm& hierarchical_copy_all_reduce() {
  return algorithm<hierarchical_copy>("hierarchical_copy", Collective::all_reduce,
                                      chunk_for_each_rank);
}

}  // namespace pycollective
