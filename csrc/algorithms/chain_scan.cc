// Prefix reductions along a chain: rank r receives the reduction of the ranks before it from rank r
// - 1, combines it with its own contribution, and sends the result to rank r + 1.
//
// Every element is combined in rank order, so that the bits of a result depend on the contributions
// alone. Cost: size - 1 rounds of the whole buffer. A long buffer is split into blocks, which
// follow each other along the chain.
#include "algorithms/algorithms.h"
#include "algorithms/function_algorithm.h"

namespace pycollective {
namespace {

Steps scan(int rank, int size) {
  if (rank == 0) {
    co_yield copy(input(0), output(0));
  } else {
    co_yield recv_reduce(rank - 1, input(0), output(0), /*completes=*/false);
  }
  if (rank + 1 < size) co_yield send(rank + 1, output(0));
}

// The received prefix waits in scratch until this rank has read its input. In place, the output is
// the input.
Steps exscan(int rank, int size) {
  const bool is_last = rank + 1 == size;
  if (rank == 0) {
    if (!is_last) co_yield send(1, input(0));
  } else if (is_last) {
    co_yield recv(rank - 1, output(0));
  } else {
    co_yield recv(rank - 1, scratch(0));
    co_yield copy(scratch(0), scratch(1));
    co_yield reduce(input(0), scratch(1), /*completes=*/false);
    co_yield send(rank + 1, scratch(1));
    co_yield copy(scratch(0), output(0));
  }
}

int two_chunks(int size) { return size > 2 ? 2 : 0; }

}  // namespace

const Algorithm& chain_scan() { return algorithm<scan>("chain", Collective::scan, one_chunk); }

const Algorithm& chain_exscan() {
  return algorithm<exscan>("chain", Collective::exscan, one_chunk, two_chunks);
}

}  // namespace pycollective
