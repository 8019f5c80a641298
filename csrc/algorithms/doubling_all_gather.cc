// Recursive doubling all-gather for any number of ranks (Bruck, Ho, Kipnis, Upfal and Weathersby,
// "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997):
// before round j = 0 … ceil(log2 size) - 1, rank r has the 2^j parts from r on; it sends all of
// them, or as many as are wanting, to rank r - 2^j, and gets those from r + 2^j on.
//
// Cost: ceil(log2 size) rounds, in size - 1 turns because a part is a message; each rank sends
// size - 1 parts, the least possible. A part passes through ceil(log2 size) ranks, not size - 1.
#include <bit>

#include "algorithms/algorithms.h"

namespace pycollective {
namespace {

class DoublingAllGather final : public Algorithm {
 public:
  std::string_view name() const override { return "doubling"; }
  Collective collective() const override { return Collective::all_gather; }
  int num_chunks(int size) const override { return size; }
  int num_steps(int, int size) const override { return 2 * size - 1; }

  Step step(int rank, int size, int k) const override {
    if (k == 0) return copy(input(0), output(rank));
    // The pair of steps that brings the part of rank + i; it is of the round in which i has its
    // highest bit.
    int i = (k + 1) / 2, distance = static_cast<int>(std::bit_floor(static_cast<unsigned>(i)));
    auto part = [&](int of) { return output((rank + of) % size); };
    if (k % 2 == 1) return send((rank - distance + size) % size, part(i - distance));
    return recv((rank + distance) % size, part(i));
  }
};

}  // namespace

const Algorithm& doubling_all_gather() {
  static const DoublingAllGather algorithm;
  return algorithm;
}

}  // namespace pycollective
