// Recursive halving reduce-scatter for any number of ranks: the recursive doubling all-gather
// (doubling_all_gather.cc) backwards. In round j = ceil(log2 size) - 1 … 0, rank r sends its sums
// so far for the 2^j ranks from r + 2^j on, or as many as there are, to rank r + 2^j; to what comes
// from r - 2^j, for the ranks from r on, it adds its own.
//
// Cost: ceil(log2 size) rounds of one message; each rank sends size - 1 parts, the least possible.
#include <algorithm>
#include <bit>

#include "algorithms/algorithms.h"
#include "support/lasting.h"

namespace pycollective {
namespace {

class HalvingReduceScatter final : public Algorithm {
 public:
  std::string_view name() const override { return "halving"; }
  Collective collective() const override { return Collective::reduce_scatter; }
  int num_chunks(int size) const override { return size; }
  // Sums on their way: chunk i is the one for rank + i.
  int num_scratch(int size) const override { return size > 2 ? farthest(size) : 0; }
  int num_steps(int, int size) const override {
    return 2 * std::bit_width(static_cast<unsigned>(size - 1)) + (copies(size) > 0);
  }

  Step step(int rank, int size, int k) const override {
    if (size == 1) return copy(input(0), output(0));
    bool last = size == 2;
    int far = farthest(size);
    if (k < 2) {  // the first round is of the ranks' inputs
      int to = (rank + far) % size, from = (rank - far + size) % size;
      if (k == 0) return send(to, input(to, size - far));
      return recv_reduce(from, input(rank, size - far), last ? output(0) : scratch(0, size - far),
                         last);
    }
    if (copies(size) > 0) {
      // What got no summand in it.
      if (k == 2)
        return copy(input((rank + size - far) % size, copies(size)),
                    scratch(size - far, copies(size)));
      --k;
    }
    int distance = far >> k / 2;
    if (k % 2 == 0) return send((rank + distance) % size, scratch(distance, distance));
    last = distance == 1;
    return recv_reduce((rank - distance + size) % size, scratch(0, distance),
                       last ? output(0) : scratch(0, distance), last);
  }

 private:
  // How far a message goes in the first round: the highest power of two below size.
  static int farthest(int size) {
    return static_cast<int>(std::bit_ceil(static_cast<unsigned>(size)) / 2);
  }
  // Sums that begin with this rank's input only in the second round.
  static int copies(int size) { return size > 1 ? 2 * farthest(size) - size : 1; }
};

}  // namespace

const Algorithm& halving_reduce_scatter() { return lasting<HalvingReduceScatter>(); }

}  // namespace pycollective
