// Recursive halving-doubling all-reduce (Rabenseifner, "Optimization of collective reduction
// operations", 2004; Thakur, Rabenseifner and Gropp, "Optimization of collective communication
// operations in MPICH", 2005).
//
// Let p be the largest power of two up to size; the buffer has p chunks.
//   fold in:  rank p + i sends its whole buffer to rank i, which adds it, and waits.
//   halving,  round j = 0 … log2 p - 1: ranks r and r XOR p / 2^(j+1) hold the same p / 2^j chunks;
//             each sends the half that the other keeps and adds what arrives to its own half.
//             After it, rank r holds the whole sum of chunk r.
//   doubling: the same pairs in reverse order exchange all that they hold.
//   fold out: rank i sends the sum to rank p + i.
// Cost: 2 log2 p rounds, in which each rank sends 2 (p - 1) / p of the buffer, the least possible;
// when size is not a power of two, two rounds more that move the whole buffer.
#include <bit>

#include "algorithms/algorithms.h"
#include "support/lasting.h"

namespace pycollective {
namespace {

class HalvingDoubling final : public Algorithm {
 public:
  std::string_view name() const override { return "halving_doubling"; }
  Collective collective() const override { return Collective::all_reduce; }
  int num_chunks(int size) const override { return power(size); }
  int num_steps(int rank, int size) const override {
    if (size == 1) return 1;
    int p = power(size);
    if (rank >= p) return 2;
    return 4 * rounds(p) + (rank + p < size ? 2 : 0);
  }

  Step step(int rank, int size, int k) const override {
    if (size == 1) return copy(input(0), output(0));
    int p = power(size);
    if (rank >= p) return k == 0 ? send(rank - p, input(0, p)) : recv(rank - p, output(0, p));
    bool folds = rank + p < size;
    if (folds) {
      if (k == 0) return recv_reduce(rank + p, input(0, p), output(0, p), /*completes=*/false);
      --k;
    }
    int halvings = 2 * rounds(p);
    if (k < halvings) return halving_step(rank, p, folds, k);
    k -= halvings;
    if (k < halvings) return doubling_step(rank, k);
    return send(rank + p, output(0, p));
  }

 private:
  static int power(int size) {
    return static_cast<int>(std::bit_floor(static_cast<unsigned>(size)));
  }
  static int rounds(int p) { return std::countr_zero(static_cast<unsigned>(p)); }
  // The `count` chunks, a power of two, that rank r ends a halving round with.
  static int first_of(int rank, int count) { return rank / count * count; }

  static Step halving_step(int rank, int p, bool folds, int k) {
    int j = k / 2, half = p >> (j + 1), partner = rank ^ half;
    bool untouched = j == 0 && !folds;  // nothing has been added to the input yet
    auto held = [&](int r) {
      return untouched ? input(first_of(r, half), half) : output(first_of(r, half), half);
    };
    if (k % 2 == 0) return send(partner, held(partner));
    return recv_reduce(partner, held(rank), output(first_of(rank, half), half),
                       /*completes=*/half == 1);
  }

  static Step doubling_step(int rank, int k) {
    int count = 1 << (k / 2), partner = rank ^ count;
    if (k % 2 == 0) return send(partner, output(first_of(rank, count), count));
    return recv(partner, output(first_of(partner, count), count));
  }
};

}  // namespace

const Algorithm& halving_doubling_all_reduce() { return lasting<HalvingDoubling>(); }

}  // namespace pycollective
