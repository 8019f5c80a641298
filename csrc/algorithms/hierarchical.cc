// Hierarchical all-reduce for hosts with several ranks. The traffic between hosts is as small as
// with one rank per host, and all ranks of a host share it equally.
//
// The buffer has as many lanes as the largest host has ranks. Lane l has one root on each host:
// member l mod (ranks of the host). A lane has as many chunks as there are hosts.
//   Up:    Every member sends each lane to the lane's root. The root adds the
//          members' lanes to its own lane, in rank order.
//   Cross: The lane's roots on all hosts run a ring all-reduce of the lane's chunks.
//   Down:  Each root sends the whole sum of its lanes to the other members.
// Each phase processes the lanes in order.
//
// Cost: 2 (hosts - 1) turns between hosts; each host sends 2 (hosts - 1) / hosts of the buffer to
// the next host.
#include "algorithms/hierarchical.h"

#include <algorithm>
#include <stdexcept>

namespace pycollective {

Hierarchical::Hierarchical(std::vector<int> hosts) : host_of_(std::move(hosts)) {
  for (int host : host_of_) {
    if (host < 0 || host >= static_cast<int>(host_of_.size())) {
      throw std::invalid_argument(
          "hosts are numbered from 0 without gaps; a number is out of range");
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
    if (ranks.empty())
      throw std::invalid_argument("hosts are numbered from 0 without gaps; a number is missing");
    lanes_ = std::max(lanes_, static_cast<int>(ranks.size()));
  }
  if (ranks_.empty())
    throw std::invalid_argument("`hosts` is empty; a group has one or more ranks");
}

int Hierarchical::num_chunks(int) const { return lanes_ * hosts(); }

Steps Hierarchical::steps(int rank, int size) const {
  if (size == 1) {
    co_yield copy(input(0), output(0));
    co_return;
  }
  auto r = static_cast<std::size_t>(rank);
  const std::vector<int>& here = ranks_[static_cast<std::size_t>(host_of_[r])];
  int members = static_cast<int>(here.size()), ring = hosts();
  auto root = [&](int lane, int host) {
    const auto& ranks = ranks_[static_cast<std::size_t>(host)];
    return ranks[static_cast<std::size_t>(lane) % ranks.size()];
  };

  for (int lane = 0; lane < lanes_; ++lane) {
    Chunks so_far = input(lane * ring, ring), sum = output(lane * ring, ring);
    if (int to = root(lane, host_of_[r]); to != rank) {
      co_yield send(to, so_far);
      continue;
    }
    int left = members - 1;  // messages still to receive
    for (int other : here) {
      if (other == rank) continue;
      --left;
      co_yield recv_reduce(other, so_far, sum, /*completes=*/ring == 1 && left == 0);
      so_far = sum;
    }
  }
  // The ring of each lane, like ring.cc for a whole buffer.
  for (int lane = member_of_[r]; lane < lanes_; lane += members) {
    int next = root(lane, (host_of_[r] + 1) % ring);
    int previous = root(lane, (host_of_[r] + ring - 1) % ring);
    int first = lane * ring, c = host_of_[r];
    auto* sums = members == 1 ? input : output;  // the sums of the host
    for (int turn = 0; turn < ring - 1; ++turn) {
      co_yield send(next, turn == 0 ? sums(first + c, 1) : output(first + c));
      c = (c + ring - 1) % ring;
      co_yield recv_reduce(previous, sums(first + c, 1), output(first + c),
                           /*completes=*/turn == ring - 2);
    }
    for (int turn = 0; turn < ring - 1; ++turn) {
      co_yield send(next, output(first + c));
      c = (c + ring - 1) % ring;
      co_yield recv(previous, output(first + c));
    }
  }
  for (int lane = 0; lane < lanes_; ++lane) {
    Chunks sum = output(lane * ring, ring);
    if (int from = root(lane, host_of_[r]); from != rank) {
      co_yield recv(from, sum);
      continue;
    }
    for (int other : here) {
      if (other != rank) co_yield send(other, sum);
    }
  }
}

}  // namespace pycollective
