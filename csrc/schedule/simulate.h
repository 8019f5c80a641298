// The simulator: how long a schedule takes on a described cluster.
//
// Each rank's clock runs through its steps, which its coroutine makes one at a time, so that memory
// is that of the ranks and of the messages under way. The model is LogGP's (Alexandrov, Ionescu,
// Schauser and Scheiman, 1995) with links of several classes:
//
//   send         the rank is busy for `overhead`, and for bytes / copy_rate if the sender copies.
//                The message then leaves through the rank's port of that link class, one after the
//                other, bytes / bandwidth each, and is at the receiver `latency` later.
//   recv         the rank waits until the message has come in through its port of that link class,
//                what comes first being served first, bytes / bandwidth each. It is busy for
//                `overhead`, and for bytes / copy_rate where the receiver copies.
//   recv_reduce  the same with bytes / reduce_rate.
//   copy, reduce bytes / copy_rate, bytes / reduce_rate.
//
// Where a link is *shared*, all ranks of a place (a host) have these two ports together. Where a
// place has fewer cores than ranks, a rank that is to be busy waits for a core and keeps it until
// its part of the step is over. Sends never wait for room; the verifier has shown that one message
// of room is enough. A rank is done when its steps are and all it has sent has been read. Buffers
// are run through in blocks, as the executor does.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "schedule/walk.h"

namespace pycollective {

// Seconds and bytes per second.
struct Link {
  double latency = 0;
  double bandwidth = std::numeric_limits<double>::infinity();
  double overhead = 0;
  bool sender_copies = false;
  bool receiver_copies = false;
  bool shared = false;
};

// Ranks in places within places: sockets, hosts, racks, the innermost first. Two ranks use
// links[i], i being the innermost level on which they are in the same place; the last link joins
// those that share none.
struct Cluster {
  int ranks = 1;
  std::vector<std::vector<int>> places;  // for each level, the place of each rank
  std::vector<Link> links;               // one more than there are levels
  double reduce_rate = std::numeric_limits<double>::infinity();
  double copy_rate = std::numeric_limits<double>::infinity();
  double call_overhead = 0;  // seconds before a rank's first step
  int cores = 0;             // of each innermost place, or of all ranks; 0: one for each rank
};

struct Simulation {
  double seconds = 0;          // until the last rank is done
  std::vector<double> finish;  // of each rank
  std::vector<double> bytes;   // by link
  std::vector<std::uint64_t> messages;
  std::uint64_t steps = 0;
};

// `bytes` is the size of the largest buffer of the call: a rank's, or the one of all parts.
// Throws std::invalid_argument for a cluster or a schedule that does not make sense, with who waits
// for whom where a schedule deadlocks. The algorithm's steps must fit (misfit() in verify.h).
Simulation simulate(const Algorithm& algorithm, const Cluster& cluster, double bytes,
                    double segment_bytes, const Watch& watch = {});

}  // namespace pycollective
