// Reduce-to-one-device all-reduce: the root adds everyone's buffer to its own in rank order, then
// sends the sum to everyone.
//
// Cost: 2 (size - 1) messages at the root, one after the other; the root moves 2 (size - 1) times
// the buffer, everyone else twice. Few ranks and small buffers; the order of the sum is plain: 0,
// 1, 2, ….
#include "algorithms/algorithms.h"
#include "support/lasting.h"

namespace pycollective {
namespace {

class ReduceToOne final : public Algorithm {
 public:
  std::string_view name() const override { return "reduce_to_one"; }
  Collective collective() const override { return Collective::all_reduce; }
  int num_chunks(int) const override { return 1; }
  int num_steps(int rank, int size) const override {
    if (size == 1) return 1;
    return rank == 0 ? 2 * (size - 1) : 2;
  }

  Step step(int rank, int size, int k) const override {
    if (size == 1) return copy(input(0), output(0));
    if (rank != 0) return k == 0 ? send(0, input(0)) : recv(0, output(0));
    if (k < size - 1) {
      return recv_reduce(k + 1, k == 0 ? input(0) : output(0), output(0),
                         /*completes=*/k == size - 2);
    }
    return send(k - (size - 1) + 1, output(0));
  }
};

}  // namespace

const Algorithm& reduce_to_one_all_reduce() { return lasting<ReduceToOne>(); }

}  // namespace pycollective
