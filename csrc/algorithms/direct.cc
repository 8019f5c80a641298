// Direct (all-to-all) all-reduce: every rank talks to every other at once.
//
// The buffer has as many chunks as there are ranks, and rank i owns chunk i.
//   scatter: every rank sends chunk i to its owner, beginning with its neighbour's;
//   reduce:  the owner combines all contributions in the order of the ranks, its own among them:
//            the bits of a result depend on nothing but the contributions;
//   gather:  the owner sends the sum to everyone.
// Cost: two rounds, whatever the size, of size - 1 messages each; each rank sends
// 2 (size - 1) / size of the buffer, the least possible.
//
// Ranks that share a board do the same without messages: executor/direct.h.
#include "algorithms/algorithms.h"
#include "support/lasting.h"

namespace pycollective {
namespace {

class Direct final : public Algorithm {
 public:
  std::string_view name() const override { return "direct"; }
  Collective collective() const override { return Collective::all_reduce; }
  int num_chunks(int size) const override { return size; }
  // Chunk `rank` of it holds what is combined so far: in place, the output is still the input.
  int num_scratch(int size) const override { return size == 1 ? 0 : size; }
  int num_steps(int rank, int size) const override {
    return size == 1 ? 1 : 3 * (size - 1) + num_combinations(rank, size);
  }

  Step step(int rank, int size, int k) const override {
    if (size == 1) return copy(input(0), output(0));
    int peers = size - 1;
    auto after = [&](int turn) {
      return (rank + 1 + turn) % size;
    };  // beginning with the neighbour
    if (k < peers) return send(after(k), input(after(k)));
    k -= peers;
    if (k < num_combinations(rank, size)) return combine(rank, size, k);
    k -= num_combinations(rank, size);
    if (k < peers) return send(after(k), output(rank));
    k -= peers;
    int other = k < rank ? k : k + 1;  // the others, in rank order
    return recv(other, output(other));
  }

 private:
  // Rank 0 begins with its own part; the others with rank 0's, so that theirs is a step too. The
  // last one's own part comes last, and the result is still to be put into its place.
  static int num_combinations(int rank, int size) {
    return size - 1 + (rank > 0) + (rank == size - 1);
  }
  static Step combine(int rank, int size, int k) {
    Span so_far = scratch(rank);
    int from = rank == 0 ? k + 1 : k;  // whose part it is about
    bool completes = from == size - 1;
    if (from == size) return copy(so_far, output(rank));
    if (from == rank) return reduce(input(rank), so_far, completes);
    if (from == 0) return recv(0, so_far);
    return recv_reduce(from, rank == 0 && k == 0 ? input(0) : so_far,
                       completes ? output(rank) : so_far, completes);
  }
};

}  // namespace

const Algorithm& direct_all_reduce() { return lasting<Direct>(); }

}  // namespace pycollective
