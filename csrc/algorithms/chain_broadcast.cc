// Pipelined chain broadcast (also called fragmented chain; Hoefler and Moor, 2014, "Energy, memory,
// and runtime tradeoffs for implementing collective communication operations"). The buffer has 16
// chunks. Each rank r forwards a chunk to rank r + 1 as soon as it has received the chunk.
//
// Cost: size + 14 rounds of a sixteenth of the buffer. Every rank sends the buffer at most once;
// the root of a tree sends it log2 size times.
#include "algorithms/algorithms.h"
#include "algorithms/function_algorithm.h"

namespace pycollective {
namespace {

int num_chunks(int) { return 16; }

Steps chain(int rank, int size) {
  for (int c = 0; c < num_chunks(size); ++c) {
    co_yield rank == 0 ? copy(input(c), output(c)) : recv(rank - 1, output(c));
    if (rank + 1 < size) co_yield send(rank + 1, output(c));
  }
}

}  // namespace

const Algorithm& chain_broadcast() {
  return algorithm<chain>("chain", Collective::broadcast, num_chunks);
}

}  // namespace pycollective
