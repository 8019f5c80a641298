// Direct (all-to-all) all-reduce: every rank talks to every other at once.
//
// The buffer has as many chunks as there are ranks, and rank i owns chunk i.
//   scatter: every rank sends chunk i to its owner, beginning with its neighbour's;
//   reduce:  the owner adds what arrives to its own chunk, in rank order;
//   gather:  the owner sends the sum to everyone.
// Cost: two rounds, whatever the size, of size - 1 messages each; each rank sends
// 2 (size - 1) / size of the buffer, the least possible.
#include "algorithms/algorithms.h"

namespace pycollective {
namespace {

class Direct final : public Algorithm {
 public:
  std::string_view name() const override { return "direct"; }
  Collective collective() const override { return Collective::all_reduce; }
  int num_chunks(int size) const override { return size; }
  int num_steps(int, int size) const override { return size == 1 ? 1 : 4 * (size - 1); }

  Step step(int rank, int size, int k) const override {
    if (size == 1) return copy(input(0), output(0));
    int phase = k / (size - 1), turn = k % (size - 1);
    int after = (rank + 1 + turn) % size;       // the others, beginning with the neighbour
    int other = turn < rank ? turn : turn + 1;  // the others, in rank order
    switch (phase) {
      case 0:
        return send(after, input(after));
      case 1:
        return recv_reduce(other, turn == 0 ? input(rank) : output(rank), output(rank),
                           /*completes=*/turn == size - 2);
      case 2:
        return send(after, output(rank));
      default:
        return recv(other, output(other));
    }
  }
};

}  // namespace

const Algorithm& direct_all_reduce() {
  static const Direct direct;
  return direct;
}

}  // namespace pycollective
