// Which algorithm algorithm="auto" means: one table, the first row that fits. A collective without
// a row has its default. `pycollective bench --tune` measures rows for a machine, which come first.
//
// The rows are from schedules measured among threads on two cores, float32 sums in place, by
// pycollective._core. measure_all_reduce(algorithm, ranks, bytes, iterations), best median of three
// turns, in µs:
//
//   ranks    bytes     ring   reduce_to_one   halving_doubling   direct
//       2   16 Ki        35              17                 35       35
//       2  512 Ki        51             156                 52       58
//       3   16 Ki        10               7                 10       12
//       3    1 Mi       237             347                247      291
//       6   16 Ki        39              16                 23       20
//       6  512 Ki       240             391                265      163
//      16   16 Ki       283              33                 89       82
//      16  512 Ki       688             803                664      496
//      16   16 Mi     34931           40036              40213    31418
//
// Among 2 processes, the slowest rank's median of 2,000 calls from Python in one run:
//
//   bytes         8    1 Ki   16 Ki   64 Ki   128 Ki
//   ring        4.8     5.6     9.0    12.5     19.7
//   to one      4.7     5.5    10.8    18.8     80.0
//
// Over TCP, µs: measured among 2 to 4 processes of one host (benchmarks/simulator.py), and
// simulated among hosts with 10 Gb/s each (Cluster.ethernet_10g), which does not know what happens
// in a switch when many send to one at once: `direct`, the fastest there from 32 KiB on, is left
// out.
//
//   ranks    bytes     ring   reduce_to_one   halving_doubling
//       4    1 Ki       113              58                 73   measured
//       4   16 Ki       133              92                110
//       4  256 Ki       322             478                249
//       4   32 Mi     52549           63948              54504
//       6  128 Ki       570            1171                714   simulated
//      16    8 Ki      1067             270                294
//      16  128 Ki      1298            3272                525
//      16   16 Mi     32585          268752              31720
//      64  512 Ki      5445           53114               1452
//      64   16 Mi     37510         1074069              33546
//
// The others, µs, medians of one run each of `pycollective bench -a all` on two busy cores: look at
// the ratios in a line.
//
//                    ranks    bytes     tree    chain
//   broadcast            3      1 Ki       19      142   threads
//                        4    512 Ki      127      173
//                        4      4 Mi     2635      989
//                        8      4 Mi     2261     2152
//                        3    512 Ki      206      197   processes
//                        3      4 Mi     1584     1430
//                        4     32 Ki      139      267   10 Gb/s, simulated
//                        4    128 Ki      345      305
//                       16    128 Ki      677      823
//                       16    512 Ki     2290     1413
//                       64    512 Ki     3408     4666
//                       64      2 Mi    13003    12049
//
//                    ranks    bytes     ring  halving   direct
//   reduce_scatter       3      1 Ki       63       56       32   threads
//                        3    512 Ki      129      141       63
//                        4    512 Ki      273      184      111
//                        8     64 Ki      150      120      142
//                        8    512 Ki      696      482      506
//                        3      8 Ki      210      122      118   processes
//                       16     32 Ki      556      556      183   10 Gb/s, simulated
//                       16     16 Mi    16254    16254    14366
//
//                    ranks    bytes     ring doubling   direct
//   all_gather           4      1 Ki       51       50       84   threads
//                        4    512 Ki      111      109      150
//                        8      4 Mi     2015     5311     8624
//                       16     32 Ki      556      556      156   10 Gb/s, simulated
//                       16     16 Mi    16358    16358    12828
//
// Of these, too, `direct` is not taken over TCP where much is sent at once.
//
// Small arrays are a matter of how often a rank is woken, large ones of how much each rank moves.
#include <climits>
#include <cstdint>
#include <string_view>

#include "algorithms/algorithms.h"

namespace pycollective {
namespace {

struct Row {
  std::string_view transport;  // "": any
  Collective collective;
  std::size_t most_bytes;
  int most_ranks;
  const Algorithm& (*algorithm)();
};

constexpr std::string_view kThreads = "threads", kProcesses = "shared memory", kTcp = "TCP", kAny;
constexpr std::size_t kAllBytes = SIZE_MAX;
constexpr int kAllRanks = INT_MAX;

constexpr Row kRows[] = {
    {kTcp, Collective::all_reduce, 8 << 10, 16, reduce_to_one_all_reduce},
    {kTcp, Collective::all_reduce, kAllBytes, 4, ring_all_reduce},
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
  // Ranks that share a board have a direct path, which no schedule overtakes.
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
