// Ring reduce-scatter: in turn t = 0 … size-2, rank r sends the sum so far of part r - t - 1 to
// rank r + 1, and adds its own contribution to what arrives of part r - t - 2 (the first half of
// the ring all-reduce). The last sum is that of part r.
//
// Cost: size - 1 turns; each rank sends size - 1 parts, the least possible. The sums on their way
// stand in size - 2 chunks of scratch: nothing tells a rank early that its neighbour has read one.
#include "algorithms/algorithms.h"
#include "support/lasting.h"

namespace pycollective {
namespace {

class RingReduceScatter final : public Algorithm {
 public:
  std::string_view name() const override { return "ring"; }
  Collective collective() const override { return Collective::reduce_scatter; }
  int num_chunks(int size) const override { return size; }
  int num_scratch(int size) const override { return size > 2 ? size - 2 : 0; }
  int num_steps(int, int size) const override { return size == 1 ? 1 : 2 * (size - 1); }

  Step step(int rank, int size, int k) const override {
    if (size == 1) return copy(input(0), output(0));
    int turn = k / 2;
    auto part = [&](int i) { return input((rank - i + 2 * size) % size); };
    if (k % 2 == 0) {
      return send((rank + 1) % size, turn == 0 ? part(1) : scratch(turn - 1));
    }
    bool last = turn == size - 2;
    return recv_reduce((rank + size - 1) % size, part(turn + 2), last ? output(0) : scratch(turn),
                       /*completes=*/last);
  }
};

}  // namespace

const Algorithm& ring_reduce_scatter() { return lasting<RingReduceScatter>(); }

}  // namespace pycollective
