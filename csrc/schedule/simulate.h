// The simulator predicts the time of a schedule on a described cluster.
//
// Each rank has a clock and executes its steps, which its coroutine yields one at a time. Memory
// holds only the ranks' states and the messages in flight. The model is LogGP (Alexandrov, Ionescu,
// Schauser and Scheiman, 1995) with several classes of links:
//
//   send         The rank is busy for `overhead`, plus bytes / copy_rate if the sender copies. The
//                message then passes the rank's outgoing port of the link class, which sends one
//                message at a time at `bandwidth`. It arrives `latency` later.
//   recv         The rank waits until the message has passed its incoming port of the link class,
//                which takes one message at a time, in order of arrival, at `bandwidth`. The rank
//                is busy for `overhead`, plus bytes / copy_rate if the receiver copies.
//   recv_reduce  Like recv, plus bytes / reduce_rate.
//   copy, reduce The rank is busy for bytes / copy_rate or bytes / reduce_rate.
//
// If a link is *shared*, all ranks of a place (a host) share one pair of ports. If a place has
// fewer cores than ranks, a busy rank waits for a core. The rank keeps the core until its part of
// the step is over. Sends never wait for buffer space: the verifier has proved that space for one
// message suffices. A rank is done when its steps are done and all its messages have been read.
// Buffers are processed in blocks, as in the executor.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "schedule/walk.h"

namespace pycollective {

// Units: seconds, and bytes per second.
struct Link {
  double latency = 0;
  double bandwidth = std::numeric_limits<double>::infinity();
  double overhead = 0;
  bool sender_copies = false;
  bool receiver_copies = false;
  bool shared = false;
};

// Ranks in nested places: sockets, hosts, racks, innermost first. Two ranks use links[i] if i is
// the innermost level on which they are in the same place. Ranks that share no place use the last
// link.
struct Cluster {
  int ranks = 1;
  std::vector<std::vector<int>> places;  // by level: the place of each rank
  std::vector<Link> links;               // one more than the number of levels
  double reduce_rate = std::numeric_limits<double>::infinity();
  double copy_rate = std::numeric_limits<double>::infinity();
  double call_overhead = 0;  // seconds before a rank's first step
  int cores = 0;  // of each innermost place (without places: of all ranks); 0: one per rank
};

struct Simulation {
  double seconds = 0;          // until the last rank is done
  std::vector<double> finish;  // by rank
  std::vector<double> bytes;   // by link
  std::vector<std::uint64_t> messages;
  std::uint64_t steps = 0;
};

// Simulates a call. `bytes` is the size of the call's largest buffer: a rank's, or the buffer of
// all parts. The algorithm's steps must fit (misfit() in verify.h). Throws std::invalid_argument
// for an invalid cluster or schedule; a deadlock's message names the waiting ranks and steps.
Simulation simulate(const Algorithm& algorithm, const Cluster& cluster, double bytes,
                    double segment_bytes, const Watch& watch = {});

}  // namespace pycollective
