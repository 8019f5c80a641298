// Ring all-reduce (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", 2009).
//
// Rank r talks to its neighbours only: it receives from r - 1 and sends to r + 1. The buffer has as
// many chunks as there are ranks.
//   reduce-scatter, turn t = 0 … size-2: send chunk r - t, add what arrives to chunk r - t - 1;
//                                        after it, rank r holds the whole sum of chunk r + 1.
//   all-gather,     turn t = 0 … size-2: send chunk r + 1 - t, receive chunk r - t.
// Cost: 2 (size - 1) turns; each rank sends 2 (size - 1) / size of the buffer, which is the least
// possible.
#include "algorithms/algorithms.h"
#include "support/lasting.h"

namespace pycollective {
namespace {

class Ring final : public Algorithm {
 public:
  std::string_view name() const override { return "ring"; }
  Collective collective() const override { return Collective::all_reduce; }
  int num_chunks(int size) const override { return size; }
  int num_steps(int, int size) const override { return size == 1 ? 1 : 4 * (size - 1); }

  Step step(int rank, int size, int k) const override {
    if (size == 1) return copy(input(0), output(0));
    int next = (rank + 1) % size, previous = (rank + size - 1) % size;
    auto chunk = [&](int i) { return ((rank + i) % size + size) % size; };
    int turn = k / 2;
    bool sends = k % 2 == 0;
    if (turn < size - 1) {
      if (sends) {
        int c = chunk(-turn);
        return send(next, turn == 0 ? input(c) : output(c));
      }
      int c = chunk(-turn - 1);
      return recv_reduce(previous, input(c), output(c), /*completes=*/turn == size - 2);
    }
    turn -= size - 1;
    return sends ? send(next, output(chunk(1 - turn))) : recv(previous, output(chunk(-turn)));
  }
};

}  // namespace

const Algorithm& ring_all_reduce() { return lasting<Ring>(); }

}  // namespace pycollective
