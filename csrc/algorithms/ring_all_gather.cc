// Ring all-gather: in turn t = 0 … size-2, rank r passes part r - t on to rank r + 1 and receives
// part r - t - 1 from rank r - 1 (the second half of the ring all-reduce).
//
// Cost: size - 1 turns; each rank sends size - 1 parts, the least possible.
#include "algorithms/algorithms.h"
#include "support/lasting.h"

namespace pycollective {
namespace {

class RingAllGather final : public Algorithm {
 public:
  std::string_view name() const override { return "ring"; }
  Collective collective() const override { return Collective::all_gather; }
  int num_chunks(int size) const override { return size; }
  int num_steps(int, int size) const override { return 2 * size - 1; }

  Step step(int rank, int size, int k) const override {
    if (k == 0) return copy(input(0), output(rank));
    int turn = (k - 1) / 2;
    auto part = [&](int i) { return (rank - i + size) % size; };
    if (k % 2 == 1) return send((rank + 1) % size, output(part(turn)));
    return recv((rank + size - 1) % size, output(part(turn + 1)));
  }
};

}  // namespace

const Algorithm& ring_all_gather() { return lasting<RingAllGather>(); }

}  // namespace pycollective
