// Direct gather: every rank sends its part to the root, which takes them in rank order.
//
// Cost: size - 1 messages at the root; each part moves once.
#include "algorithms/algorithms.h"
#include "support/lasting.h"

namespace pycollective {
namespace {

class DirectGather final : public Algorithm {
 public:
  std::string_view name() const override { return "direct"; }
  Collective collective() const override { return Collective::gather; }
  int num_chunks(int size) const override { return size; }
  int num_steps(int rank, int size) const override { return rank == 0 ? size : 1; }

  Step step(int rank, int, int k) const override {
    if (rank != 0) return send(0, input(0));
    return k == 0 ? copy(input(0), output(0)) : recv(k, output(k));
  }
};

}  // namespace

const Algorithm& direct_gather() { return lasting<DirectGather>(); }

}  // namespace pycollective
