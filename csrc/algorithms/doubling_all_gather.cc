// Recursive doubling all-gather for any number of ranks (Bruck, Ho, Kipnis, Upfal and Weathersby,
// "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997):
// before round j = 0 … ceil(log2 size) - 1, rank r has the 2^j parts from r on; it sends all of
// them, or as many as are wanting, to rank r - 2^j, and gets those from r + 2^j on.
//
// Cost: ceil(log2 size) rounds of one message; each rank sends size - 1 parts, the least possible.
#include <algorithm>
#include <bit>

#include "algorithms/algorithms.h"
#include "support/lasting.h"

namespace pycollective {
namespace {

class DoublingAllGather final : public Algorithm {
 public:
  std::string_view name() const override { return "doubling"; }
  Collective collective() const override { return Collective::all_gather; }
  int num_chunks(int size) const override { return size; }
  int num_steps(int, int size) const override {
    return 1 + 2 * std::bit_width(static_cast<unsigned>(size - 1));
  }

  Step step(int rank, int size, int k) const override {
    if (k == 0) return copy(input(0), output(rank));
    int distance = 1 << (k - 1) / 2, parts = std::min(distance, size - distance);
    int peer = (rank + distance) % size;
    if (k % 2 == 1) return send((rank - distance + size) % size, output(rank, parts));
    return recv(peer, output(peer, parts));
  }
};

}  // namespace

const Algorithm& doubling_all_gather() { return lasting<DoublingAllGather>(); }

}  // namespace pycollective
