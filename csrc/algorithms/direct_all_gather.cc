// Direct all-gather: every rank sends its part to all others, beginning with its neighbour.
//
// Cost: one round of size - 1 messages; each rank sends size - 1 parts, the least possible.
#include "algorithms/algorithms.h"
#include "support/lasting.h"

namespace pycollective {
namespace {

class DirectAllGather final : public Algorithm {
 public:
  std::string_view name() const override { return "direct"; }
  Collective collective() const override { return Collective::all_gather; }
  int num_chunks(int size) const override { return size; }
  int num_steps(int, int size) const override { return 2 * size - 1; }

  Step step(int rank, int size, int k) const override {
    if (k == 0) return copy(input(0), output(rank));
    if (k < size) return send((rank + k) % size, output(rank));
    int from = (rank - (k - size + 1) + size) % size;
    return recv(from, output(from));
  }
};

}  // namespace

const Algorithm& direct_all_gather() { return lasting<DirectAllGather>(); }

}  // namespace pycollective
