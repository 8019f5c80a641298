// Binomial tree reduce: the binomial broadcast turned round. In round j, rank r whose lowest set
// bit is j sends the sum that it has, of ranks r … r + 2^j - 1, to rank r - 2^j.
//
// Cost: ceil(log2 size) rounds; every rank but the root sends the buffer once. A rank that adds and
// is not the root has no output, and adds in one chunk of scratch.
#include "algorithms/algorithms.h"
#include "support/lasting.h"

namespace pycollective {
namespace {

class TreeReduce final : public Algorithm {
 public:
  std::string_view name() const override { return "tree"; }
  Collective collective() const override { return Collective::reduce; }
  int num_chunks(int) const override { return 1; }
  int num_scratch(int) const override { return 1; }
  int num_steps(int rank, int size) const override {
    return size == 1 ? 1 : num_children(rank, size) + (rank != 0);
  }

  Step step(int rank, int size, int k) const override {
    if (size == 1) return copy(input(0), output(0));
    int children = num_children(rank, size);
    Span sum = rank == 0 ? output(0) : scratch(0);
    if (k == children) return send(rank & (rank - 1), k == 0 ? input(0) : sum);
    return recv_reduce(rank + (1 << k), k == 0 ? input(0) : sum, sum,
                       /*completes=*/rank == 0 && k == children - 1);
  }

 private:
  static int num_children(int rank, int size) {
    int count = 0;
    while (!(rank >> count & 1) && rank + (1 << count) < size) ++count;
    return count;
  }
};

}  // namespace

const Algorithm& tree_reduce() { return lasting<TreeReduce>(); }

}  // namespace pycollective
