// Pipelined chain broadcast (also called fragmented chain; Hoefler and Moor, "Energy, memory, and
// runtime tradeoffs for implementing collective communication operations", 2014): the buffer has 16
// chunks, and rank r passes each on to rank r + 1 as soon as it has it.
//
// Cost: 15 + size - 1 rounds of a sixteenth of the buffer; every rank sends the buffer once at
// most, where the root of a tree sends it log2 size times.
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
