// The choice of algorithm="auto": the first row of the table that fits. A collective without a row
// uses its default. Rows that `pycollective bench --tune` measured for a machine take precedence.
//
// The other rows were measured or simulated: benchmarks/results/tuning.md.
#include <climits>
#include <cstdint>
#include <string_view>

#include "algorithms/algorithms.h"

namespace pycollective {
namespace {

struct Row {
  std::string_view transport;  // "": every transport
  Collective collective;
  std::size_t most_bytes;
  int most_ranks;
  const Algorithm& (*algorithm)();
};

constexpr std::string_view kThreads = "threads", kProcesses = "shared memory", kTcp = "TCP", kAny;
constexpr std::size_t kAllBytes = SIZE_MAX;
constexpr int kAllRanks = INT_MAX;

constexpr Row kRows[] = {
    {kTcp, Collective::all_reduce, 32 << 10, kAllRanks, recursive_doubling_all_reduce},
    {kTcp, Collective::all_reduce, kAllBytes, 3, ring_all_reduce},
    {kTcp, Collective::all_reduce, 512 << 10, kAllRanks, halving_doubling_all_reduce},
    {kTcp, Collective::all_reduce, kAllBytes, kAllRanks, ring_all_reduce},
    {kAny, Collective::all_reduce, 8 << 10, 4, reduce_to_one_all_reduce},
    {kAny, Collective::all_reduce, kAllBytes, 4, ring_all_reduce},
    {kAny, Collective::all_reduce, 128 << 10, kAllRanks, reduce_to_one_all_reduce},
    {kAny, Collective::all_reduce, kAllBytes, kAllRanks, direct_all_reduce},

    {kAny, Collective::broadcast, kAllBytes, 2, tree_broadcast},
    {kTcp, Collective::broadcast, 64 << 10, 4, tree_broadcast},
    {kTcp, Collective::broadcast, kAllBytes, 4, chain_broadcast},
    {kTcp, Collective::broadcast, 256 << 10, 16, tree_broadcast},
    {kTcp, Collective::broadcast, kAllBytes, 16, chain_broadcast},
    {kAny, Collective::broadcast, 1 << 20, kAllRanks, tree_broadcast},
    {kAny, Collective::broadcast, kAllBytes, kAllRanks, chain_broadcast},

    {kTcp, Collective::reduce_scatter, 32 << 10, kAllRanks, direct_reduce_scatter},
    {kTcp, Collective::reduce_scatter, kAllBytes, kAllRanks, ring_reduce_scatter},
    {kAny, Collective::reduce_scatter, kAllBytes, 4, direct_reduce_scatter},
    {kAny, Collective::reduce_scatter, kAllBytes, kAllRanks, halving_reduce_scatter},

    {kTcp, Collective::all_gather, 32 << 10, kAllRanks, direct_all_gather},
    {kAny, Collective::all_gather, kAllBytes, kAllRanks, ring_all_gather},
};

}  // namespace

const Algorithm& select(Collective collective, std::size_t bytes, int ranks,
                        std::string_view transport) {
  // Ranks that share a board have a direct path, which is faster than every schedule.
  if (transport == kThreads || transport == kProcesses) return direct_algorithm(collective);
  for (const Row& row : kRows) {
    if (row.collective == collective && bytes <= row.most_bytes && ranks <= row.most_ranks &&
        (row.transport == kAny || row.transport == transport)) {
      return row.algorithm();
    }
  }
  return default_algorithm(collective);
}

}  // namespace pycollective
