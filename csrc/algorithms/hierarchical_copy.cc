// Hierarchical copy all-reduce, after TensorFlow's HierarchicalCopyAllReduce for two cliques of
// devices that are joined by slower links; here it is right for every number of ranks, odd ones
// too.
//
// The ranks form two halves, 0 … h-1 and h … size-1 with h = ceil(size / 2). The buffer has as many
// chunks as there are ranks, and chunk i has one root in each half: member i mod (size of the
// half). The roots rotate, so that every rank does the same share of the work.
//   up:    every member sends its chunk to the half's root, which adds them in rank order;
//   cross: the second half's root sends its sum to the first's for even i (the other way round for
//   odd
//          i), gets the whole sum back;
//   down:  each root sends the whole sum to its half.
// Each phase goes through the chunks in order. Cost: each chunk crosses between the halves twice,
// however many ranks there are; each rank sends about twice the buffer.
#include "algorithms/algorithms.h"
#include "algorithms/clique.h"
#include "support/lasting.h"

namespace pycollective {
namespace {

// One rank's view of its half.
struct Half : Clique {
  int first;  // the half's first rank

  Half(int rank, int ranks) : Half(rank, ranks, (ranks + 1) / 2) {}
  int other(int turn) const { return first + Clique::other(turn); }
  int root(int chunk) const { return first + Clique::root(chunk); }

 private:
  Half(int rank, int ranks, int h)
      : Clique(rank < h ? h : ranks - h, rank < h ? rank : rank - h, ranks),
        first(rank < h ? 0 : h) {}
};

class HierarchicalCopy final : public Algorithm {
 public:
  std::string_view name() const override { return "hierarchical_copy"; }
  Collective collective() const override { return Collective::all_reduce; }
  int num_chunks(int size) const override { return size; }
  int num_steps(int rank, int size) const override {
    if (size == 1) return 1;
    Half half(rank, size);
    return 2 * half.steps(size) + 2 * half.roots;
  }

  Step step(int rank, int size, int k) const override {
    if (size == 1) return copy(input(0), output(0));
    Half half(rank, size);
    int up = half.steps(size), cross = 2 * half.roots;
    if (k < up) return up_step(half, k);
    if (k < up + cross) return cross_step(half, rank, size, k - up);
    return down_step(half, k - up - cross);
  }

 private:
  static Step up_step(const Half& half, int k) {
    int chunk, turn;
    half.locate(k, &chunk, &turn);
    if (chunk % half.size != half.member) return send(half.root(chunk), input(chunk));
    return recv_reduce(half.other(turn), turn == 0 ? input(chunk) : output(chunk), output(chunk),
                       /*completes=*/false);
  }

  static Step cross_step(const Half& half, int rank, int size, int k) {
    int chunk = half.member + k / 2 * half.size;
    int h = (size + 1) / 2;
    bool in_first = rank < h;
    int partner = in_first ? h + chunk % (size - h) : chunk % h;
    // A half of one rank has no up phase: its sum is its input.
    Span sum = half.size == 1 ? input(chunk) : output(chunk);
    bool adds = in_first == (chunk % 2 == 0);
    if (adds) {
      return k % 2 == 0 ? recv_reduce(partner, sum, output(chunk), /*completes=*/true)
                        : send(partner, output(chunk));
    }
    return k % 2 == 0 ? send(partner, sum) : recv(partner, output(chunk));
  }

  static Step down_step(const Half& half, int k) {
    int chunk, turn;
    half.locate(k, &chunk, &turn);
    if (chunk % half.size != half.member) return recv(half.root(chunk), output(chunk));
    return send(half.other(turn), output(chunk));
  }
};

}  // namespace

const Algorithm& hierarchical_copy_all_reduce() { return lasting<HierarchicalCopy>(); }

}  // namespace pycollective
