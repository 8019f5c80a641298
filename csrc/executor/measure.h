// Measurements of the executor's overhead (benchmarks/executor_overhead.py) and of the machine.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace pycollective {

// Returns the seconds of each all-reduce of float32 sums among threads, on the slowest rank. Values
// of `how`:
// - "executor": The ring schedule, run by Communicator.
// - Name of another algorithm: That algorithm, run by Communicator ("direct" has no schedule here:
//   it uses the direct path).
// - "plain_ring": The same ring over the same transport, written as a loop.
// - "plain_loop": No transport. Each rank publishes a pointer, adds its part of all ranks' arrays,
//   and copies the other parts, with barriers in between.
//
// Throws std::runtime_error if a result is wrong.
std::vector<double> measure_all_reduce(const std::string& how, int ranks, std::size_t bytes,
                                       int iterations);

// Bytes per second.
struct Rates {
  double copy, reduce;
};
// Measures `ranks` threads that concurrently copy, and add, `bytes` bytes that a neighbour has just
// written. The simulator uses the rates.
Rates measure_rates(int ranks, std::size_t bytes, int iterations);

// Returns the seconds of one round in which every rank waits for every other: the lower bound for a
// collective's latency. In a round, a rank writes its own cache line, then polls the other lines.
// `lines` has one line for each rank, zero at first. With `oversubscribed`, a waiting rank yields
// at once.
double measure_handshake(std::byte* lines, int rank, int ranks, int rounds, bool oversubscribed);

}  // namespace pycollective
