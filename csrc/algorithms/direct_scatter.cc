// Direct scatter: the root sends every rank its part, in rank order.
//
// Cost: size - 1 messages at the root; each part moves once.
#include "algorithms/algorithms.h"
#include "support/lasting.h"

namespace pycollective {
namespace {

class DirectScatter final : public Algorithm {
 public:
  std::string_view name() const override { return "direct"; }
  Collective collective() const override { return Collective::scatter; }
  int num_chunks(int size) const override { return size; }
  int num_steps(int rank, int size) const override { return rank == 0 ? size : 1; }

  Step step(int rank, int size, int k) const override {
    if (rank != 0) return recv(0, output(0));
    return k < size - 1 ? send(k + 1, input(k + 1)) : copy(input(0), output(0));
  }
};

}  // namespace

const Algorithm& direct_scatter() { return lasting<DirectScatter>(); }

}  // namespace pycollective
