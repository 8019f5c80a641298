// Recursive halving-doubling all-reduce (Rabenseifner, 2004, "Optimization of collective reduction
// operations"; Thakur, Rabenseifner and Gropp, 2005, "Optimization of collective communication
// operations in MPICH").
//
// Let p be the largest power of two up to size. The buffer has p chunks.
//   Fold in:  Rank p + i sends its whole buffer to rank i, which adds it. Rank p + i then waits.
//   Halving,  round j = 0 … log2 p - 1: Ranks r and r XOR p / 2^(j+1) hold the same p / 2^j chunks.
//             Each sends the half that the other keeps, and adds the received half to its own.
//             Afterwards rank r holds the whole sum of chunk r.
//   Doubling: The same pairs, in reverse order, exchange all chunks that they hold.
//   Fold out: Rank i sends the sum to rank p + i.
// Cost: 2 log2 p rounds, in which each rank sends 2 (p - 1) / p of the buffer, the minimum. If size
// is not a power of two, two more rounds move the whole buffer.
#include <bit>

#include "algorithms/algorithms.h"
#include "algorithms/function_algorithm.h"

namespace pycollective {
namespace {

int power(int size) { return static_cast<int>(std::bit_floor(static_cast<unsigned>(size))); }

Steps halving_doubling(int rank, int size) {
  if (size == 1) co_yield copy(input(0), output(0));
  int p = power(size);
  if (rank >= p) {
    co_yield send(rank - p, input(0, p));
    co_yield recv(rank - p, output(0, p));
    co_return;
  }
  bool folds = rank + p < size;
  if (folds) co_yield recv_reduce(rank + p, input(0, p), output(0, p), /*completes=*/false);
  auto* sums = folds ? output : input;  // the partial sums
  for (int half = p / 2; half > 0; half /= 2) {
    int partner = rank ^ half, kept = rank / half * half, given = partner / half * half;
    co_yield send(partner, sums(given, half));
    co_yield recv_reduce(partner, sums(kept, half), output(kept, half),
                         /*completes=*/half == 1);
    sums = output;
  }
  for (int held = 1; held < p; held *= 2) {
    int partner = rank ^ held;
    co_yield send(partner, output(rank / held * held, held));
    co_yield recv(partner, output(partner / held * held, held));
  }
  if (folds) co_yield send(rank + p, output(0, p));
}

}  // namespace

const Algorithm& halving_doubling_all_reduce() {
  return algorithm<halving_doubling>("halving_doubling", Collective::all_reduce, power);
}

}  // namespace pycollective
