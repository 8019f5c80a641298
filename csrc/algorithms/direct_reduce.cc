// Direct reduce: every rank sends its buffer to the root, which combines them in rank order,
// beginning with its own.
//
// Cost: size - 1 messages at the root; one round, whatever the size.
#include "algorithms/algorithms.h"
#include "support/lasting.h"

namespace pycollective {
namespace {

class DirectReduce final : public Algorithm {
 public:
  std::string_view name() const override { return "direct"; }
  Collective collective() const override { return Collective::reduce; }
  int num_chunks(int) const override { return 1; }
  int num_steps(int rank, int size) const override {
    return rank == 0 && size > 1 ? size - 1 : 1;
  }

  Step step(int rank, int size, int k) const override {
    if (rank != 0) return send(0, input(0));
    if (size == 1) return copy(input(0), output(0));
    return recv_reduce(k + 1, k == 0 ? input(0) : output(0), output(0),
                       /*completes=*/k == size - 2);
  }
};

}  // namespace

const Algorithm& direct_reduce() { return lasting<DirectReduce>(); }

}  // namespace pycollective
