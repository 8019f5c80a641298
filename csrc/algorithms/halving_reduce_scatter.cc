// Recursive halving reduce-scatter for any number of ranks: the recursive doubling all-gather
// (doubling_all_gather.cc) backwards. In round j = ceil(log2 size) - 1 … 0, rank r sends its sums
// so far for the 2^j ranks from r + 2^j on, or as many as there are, to rank r + 2^j; to what comes
// from r - 2^j, for the ranks from r on, it adds its own.
//
// Cost: ceil(log2 size) rounds, in size - 1 turns because a part is a message; each rank sends
// size - 1 parts, the least possible. A sum passes through ceil(log2 size) ranks, not size - 1.
#include <bit>

#include "algorithms/algorithms.h"

namespace pycollective {
namespace {

class HalvingReduceScatter final : public Algorithm {
 public:
  std::string_view name() const override { return "halving"; }
  Collective collective() const override { return Collective::reduce_scatter; }
  int num_chunks(int size) const override { return size; }
  // Sums on their way: chunk i is the one for rank i.
  int num_scratch(int size) const override { return size > 2 ? size : 0; }
  int num_steps(int, int size) const override { return size == 1 ? 1 : 2 * (size - 1); }

  Step step(int rank, int size, int k) const override {
    if (size == 1) return copy(input(0), output(0));
    // The pair of steps that sends the sum for rank + i away: the last pair is of i = 1.
    int i = size - 1 - k / 2, distance = power_in(i);
    if (k % 2 == 0) return send((rank + distance) % size, sum_for(rank, size, i, distance));
    int kept = i - distance;
    bool last = distance == 1;
    return recv_reduce((rank - distance + size) % size, sum_for(rank, size, kept, distance),
                       last ? output(0) : scratch((rank + kept) % size), /*completes=*/last);
  }

 private:
  // The highest power of two up to i, which is the distance of the round that sends the sum for
  // rank + i away.
  static int power_in(int i) { return static_cast<int>(std::bit_floor(static_cast<unsigned>(i))); }
  // What is added up for rank + i before the round of a distance: in the round before it, of twice
  // the distance, it got a summand if some rank sent one for i + 2 distance.
  static Span sum_for(int rank, int size, int i, int distance) {
    int to = (rank + i) % size;
    return i + 2 * distance < size ? scratch(to) : input(to);
  }
};

}  // namespace

const Algorithm& halving_reduce_scatter() {
  static const HalvingReduceScatter algorithm;
  return algorithm;
}

}  // namespace pycollective
