// Dissemination barrier (Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization",
// 1988): in round j rank r signals rank r + 2^j and waits for rank r - 2^j. Cost: ceil(log2 size)
// rounds of empty messages.
#include <bit>

#include "algorithms/algorithms.h"
#include "support/lasting.h"

namespace pycollective {
namespace {

class DisseminationBarrier final : public Algorithm {
 public:
  std::string_view name() const override { return "dissemination"; }
  Collective collective() const override { return Collective::barrier; }
  int num_chunks(int) const override { return 1; }
  int num_steps(int, int size) const override {
    return 2 * std::bit_width(static_cast<unsigned>(size - 1));
  }
  Step step(int rank, int size, int k) const override {
    int distance = 1 << (k / 2);
    if (k % 2 == 0) return send((rank + distance) % size, input(0, 0));
    return recv((rank + size - distance) % size, output(0, 0));
  }
};

}  // namespace

const Algorithm& dissemination_barrier() { return lasting<DisseminationBarrier>(); }

}  // namespace pycollective
