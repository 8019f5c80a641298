// What the executor costs: one all-reduce of float32 sums among threads, done in several ways in
// the same run. benchmarks/executor_overhead.py prints it.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace pycollective {

// Seconds of each iteration (the slowest rank's). `how`:
//   "executor"   the ring's schedule through the executor, as Communicator runs it; or the name of
//                another all_reduce algorithm
//   "plain_ring" the same ring over the same transport, written out as a loop
//   "plain_loop" no transport: publish a pointer, barrier, add one's part from all ranks' memory,
//                barrier, copy the other parts
// Throws std::runtime_error when a result is wrong.
std::vector<double> measure_all_reduce(const std::string& how, int ranks, std::size_t bytes,
                                       int iterations);

// Bytes a second at which each of `ranks` threads copies, and adds, `bytes` that a neighbour has
// just written, all at the same time: what a simulated cluster needs to know of this machine.
struct Rates {
  double copy, reduce;
};
Rates measure_rates(int ranks, std::size_t bytes, int iterations);

// Seconds of a round of handshakes: the least time of a call for which every rank waits for every
// other. In a round a rank writes its cache line, and waits until it has seen those of all others.
// `lines` has a cache line for each rank, zero before the ranks' first rounds. In a crowd a rank
// that waits yields.
double measure_handshake(std::byte* lines, int rank, int ranks, int rounds, bool crowd);

}  // namespace pycollective
