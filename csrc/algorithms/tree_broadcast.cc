// Binomial tree broadcast: in round j the ranks below 2^j, which have the buffer, send it 2^j
// further.
//
// Cost: ceil(log2 size) rounds; the root sends the buffer once in each.
#include <bit>

#include "algorithms/algorithms.h"
#include "support/lasting.h"

namespace pycollective {
namespace {

class TreeBroadcast final : public Algorithm {
 public:
  std::string_view name() const override { return "tree"; }
  Collective collective() const override { return Collective::broadcast; }
  int num_chunks(int) const override { return 1; }

  // One step to get the buffer, one for each child.
  int num_steps(int rank, int size) const override {
    int steps = 1;
    for (int j = first_round(rank); (1 << j) < size && rank + (1 << j) < size; ++j) ++steps;
    return steps;
  }

  Step step(int rank, int, int k) const override {
    if (k > 0) return send(rank + (1 << (first_round(rank) + k - 1)), output(0));
    if (rank == 0) return copy(input(0), output(0));
    return recv(rank - (1 << (first_round(rank) - 1)), output(0));
  }

 private:
  // The round in which a rank first sends: the one after it receives.
  static int first_round(int rank) { return std::bit_width(static_cast<unsigned>(rank)); }
};

}  // namespace

const Algorithm& tree_broadcast() { return lasting<TreeBroadcast>(); }

}  // namespace pycollective
