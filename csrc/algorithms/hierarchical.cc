// Hierarchical all-reduce for hosts of several ranks: what crosses between hosts is as much as if
// each host were one rank, and every rank of a host sends its share of it.
//
// The buffer has as many lanes as the largest host has ranks; on each host, lane l has one root,
// member l mod (ranks of the host). A lane has as many chunks as there are hosts.
//   up:    every member sends each lane to its root, which adds them in rank order;
//   cross: the lane's roots on all hosts reduce its chunks round a ring, and gather them;
//   down:  each root sends the whole sum of its lanes to the other members.
// Each phase goes through the lanes in order. Cost: 2 (hosts - 1) turns between hosts; of the
// buffer, each host sends 2 (hosts - 1) / hosts to the next one.
#include "algorithms/hierarchical.h"

#include <algorithm>
#include <stdexcept>

#include "algorithms/clique.h"

namespace pycollective {

Hierarchical::Hierarchical(std::vector<int> hosts) : host_of_(std::move(hosts)) {
  for (int host : host_of_) {
    if (host < 0 || host >= static_cast<int>(host_of_.size())) {
      throw std::invalid_argument("hosts are numbered from 0, as many as there are");
    }
    ranks_.resize(std::max(ranks_.size(), static_cast<std::size_t>(host) + 1));
    fingerprint_ = fingerprint_ * 0x9e3779b97f4a7c15 + static_cast<std::uint64_t>(host) + 1;
  }
  for (std::size_t r = 0; r < host_of_.size(); ++r) {
    auto& ranks = ranks_[static_cast<std::size_t>(host_of_[r])];
    member_of_.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(static_cast<int>(r));
  }
  for (const auto& ranks : ranks_) {
    if (ranks.empty()) throw std::invalid_argument("a host without ranks");
    lanes_ = std::max(lanes_, static_cast<int>(ranks.size()));
  }
  if (ranks_.empty()) throw std::invalid_argument("a group has ranks");
}

int Hierarchical::num_chunks(int) const { return lanes_ * hosts(); }

int Hierarchical::num_steps(int rank, int size) const {
  if (size == 1) return 1;
  auto r = static_cast<std::size_t>(rank);
  int members = static_cast<int>(ranks_[static_cast<std::size_t>(host_of_[r])].size());
  Clique clique(members, member_of_[r], lanes_);
  return 2 * clique.steps(lanes_) + clique.roots * 4 * (hosts() - 1);
}

Step Hierarchical::step(int rank, int size, int k) const {
  if (size == 1) return copy(input(0), output(0));
  auto r = static_cast<std::size_t>(rank);
  const auto& here = ranks_[static_cast<std::size_t>(host_of_[r])];
  Clique clique(static_cast<int>(here.size()), member_of_[r], lanes_);
  int up = clique.steps(lanes_), cross = clique.roots * 4 * (hosts() - 1);
  if (k >= up && k < up + cross) {
    int index = (k - up) / (4 * (hosts() - 1));
    return cross_step(rank, clique.member + index * clique.size, (k - up) % (4 * (hosts() - 1)));
  }
  bool goes_up = k < up;
  int lane, turn;
  clique.locate(goes_up ? k : k - up - cross, &lane, &turn);
  auto whole = [&](Span first) { return Span{first.buffer, first.first, hosts()}; };
  Span in = whole(input(lane * hosts())), out = whole(output(lane * hosts()));
  int root = here[static_cast<std::size_t>(clique.root(lane))];
  int other = here[static_cast<std::size_t>(clique.other(std::min(turn, clique.size - 2)))];
  if (rank != root) return goes_up ? send(root, in) : recv(root, out);
  if (!goes_up) return send(other, out);
  bool completes = hosts() == 1 && turn == clique.size - 2;
  return recv_reduce(other, turn == 0 ? in : out, out, completes);
}

// The ring of a lane, as ring.cc has it for a whole buffer.
Step Hierarchical::cross_step(int rank, int lane, int k) const {
  int host = host_of_[static_cast<std::size_t>(rank)], ring = hosts();
  auto root = [&](int at) {
    const auto& ranks = ranks_[static_cast<std::size_t>((at + ring) % ring)];
    return ranks[static_cast<std::size_t>(lane) % ranks.size()];
  };
  auto chunk = [&](int i) { return lane * ring + ((host + i) % ring + ring) % ring; };
  bool alone = ranks_[static_cast<std::size_t>(host)].size() == 1;  // its sum is its input
  int turn = k / 2;
  bool sends = k % 2 == 0;
  if (turn < ring - 1) {
    if (sends) {
      int c = chunk(-turn);
      return send(root(host + 1), alone && turn == 0 ? input(c) : output(c));
    }
    int c = chunk(-turn - 1);
    return recv_reduce(root(host - 1), alone ? input(c) : output(c), output(c),
                       /*completes=*/turn == ring - 2);
  }
  turn -= ring - 1;
  return sends ? send(root(host + 1), output(chunk(1 - turn)))
               : recv(root(host - 1), output(chunk(-turn)));
}

}  // namespace pycollective
