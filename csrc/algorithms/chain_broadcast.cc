// Pipelined chain broadcast (also called fragmented chain; Hoefler and Moor, "Energy, memory, and
// runtime tradeoffs for implementing collective communication operations", 2014): the buffer has 16
// chunks, and rank r passes each on to rank r + 1 as soon as it has it.
//
// Cost: 15 + size - 1 rounds of a sixteenth of the buffer; every rank sends the buffer once at
// most, where the root of a tree sends it log2 size times.
#include "algorithms/algorithms.h"
#include "support/lasting.h"

namespace pycollective {
namespace {

class ChainBroadcast final : public Algorithm {
 public:
  std::string_view name() const override { return "chain"; }
  Collective collective() const override { return Collective::broadcast; }
  int num_chunks(int) const override { return kChunks; }
  int num_steps(int rank, int size) const override {
    return rank + 1 < size ? 2 * kChunks : kChunks;
  }

  Step step(int rank, int size, int k) const override {
    bool passes_on = rank + 1 < size;
    int chunk = passes_on ? k / 2 : k;
    if (passes_on && k % 2 == 1) return send(rank + 1, output(chunk));
    return rank == 0 ? copy(input(chunk), output(chunk)) : recv(rank - 1, output(chunk));
  }

 private:
  static constexpr int kChunks = 16;
};

}  // namespace

const Algorithm& chain_broadcast() { return lasting<ChainBroadcast>(); }

}  // namespace pycollective
