// Direct broadcast: the root sends its buffer to every rank, in rank order.
//
// Cost: size - 1 messages at the root; each rank receives the buffer once.
#include "algorithms/algorithms.h"
#include "support/lasting.h"

namespace pycollective {
namespace {

class DirectBroadcast final : public Algorithm {
 public:
  std::string_view name() const override { return "direct"; }
  Collective collective() const override { return Collective::broadcast; }
  int num_chunks(int) const override { return 1; }
  int num_steps(int rank, int size) const override { return rank == 0 ? size : 1; }

  Step step(int rank, int, int k) const override {
    if (rank != 0) return recv(0, output(0));
    return k == 0 ? copy(input(0), output(0)) : send(k, output(0));
  }
};

}  // namespace

const Algorithm& direct_broadcast() { return lasting<DirectBroadcast>(); }

}  // namespace pycollective
