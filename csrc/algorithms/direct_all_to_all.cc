// Direct (pairwise) all-to-all: in turn t = 1 … size-1, rank r sends to rank r + t and receives
// from rank r - t, so that nobody is sent to by two ranks in one turn (Thakur, Rabenseifner and
// Gropp, 2005).
//
// Cost: size - 1 turns; each rank sends size - 1 parts, the least possible.
#include "algorithms/algorithms.h"
#include "support/lasting.h"

namespace pycollective {
namespace {

class DirectAllToAll final : public Algorithm {
 public:
  std::string_view name() const override { return "direct"; }
  Collective collective() const override { return Collective::all_to_all; }
  int num_chunks(int size) const override { return size; }
  int num_steps(int, int size) const override { return 2 * size - 1; }

  Step step(int rank, int size, int k) const override {
    if (k == 0) return copy(input(rank), output(rank));
    int turn = (k + 1) / 2, to = (rank + turn) % size, from = (rank + size - turn) % size;
    return k % 2 == 1 ? send(to, input(to)) : recv(from, output(from));
  }
};

}  // namespace

const Algorithm& direct_all_to_all() { return lasting<DirectAllToAll>(); }

}  // namespace pycollective
