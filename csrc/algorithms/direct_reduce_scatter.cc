// Direct reduce-scatter: every rank sends part i to rank i, beginning with its neighbour's; rank i
// adds what arrives to its own part, in rank order.
//
// Cost: one round of size - 1 messages; each rank sends size - 1 parts, the least possible.
#include "algorithms/algorithms.h"
#include "support/lasting.h"

namespace pycollective {
namespace {

class DirectReduceScatter final : public Algorithm {
 public:
  std::string_view name() const override { return "direct"; }
  Collective collective() const override { return Collective::reduce_scatter; }
  int num_chunks(int size) const override { return size; }
  int num_steps(int, int size) const override { return size == 1 ? 1 : 2 * (size - 1); }

  Step step(int rank, int size, int k) const override {
    if (size == 1) return copy(input(0), output(0));
    if (k < size - 1) {
      int to = (rank + 1 + k) % size;
      return send(to, input(to));
    }
    k -= size - 1;
    return recv_reduce(k < rank ? k : k + 1, k == 0 ? input(rank) : output(0), output(0),
                       /*completes=*/k == size - 2);
  }
};

}  // namespace

const Algorithm& direct_reduce_scatter() { return lasting<DirectReduceScatter>(); }

}  // namespace pycollective
