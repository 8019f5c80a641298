// A group in which some ranks share a host. They exchange messages through shared memory; all other
// pairs of ranks use TCP.
//
// Every pair of ranks has a TCP control connection, which detects the end of a process. A rank
// enters each call in both transports, and a failure in one transport fails the other too. A rank
// that waits for both transports sleeps in one poll() over its connections. A peer of its host ends
// the poll() by a frame on their control connection.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/group.h"
#include "transport/shm.h"
#include "transport/tcp.h"

namespace pycollective {

class MixedGroup final : public Group {
 public:
  // `streams` and `pipes` are as for TcpGroup; ranks of this host need the control connection only.
  // hosts[r] is the number of rank r's host. `memory` has the ranks of this host in ascending
  // order, and this rank has joined it. Throws std::invalid_argument.
  MixedGroup(int rank, const std::vector<std::vector<int>>& streams, const std::vector<int>& pipes,
             std::shared_ptr<ShmGroup> memory, std::vector<int> hosts);
  ~MixedGroup() override;

  int size() const override { return tcp_.size(); }
  Endpoint& endpoint(int rank) override;
  void fail(const Failure& failure) noexcept override;
  std::optional<Failure> failure() const override;
  bool finds_failure() const override {
    return one_host() ? shm_->finds_failure() : failure().has_value();
  }
  std::shared_ptr<Pipes> pipes(int rank) override {
    return one_host() ? shm_->pipes(rank) : tcp_.pipes(rank);
  }
  bool has_left(int rank) const override { return tcp_.has_left(rank); }
  void leave(int rank) noexcept override;
  void abandon() noexcept override;
  std::string_view transport() const override;
  // Ranks in other containers of this host have the same address, but are not in the memory.
  bool is_oversubscribed() const override {
    return shm_->is_oversubscribed() || (tcp_.here() > shm_->size() && tcp_.is_oversubscribed());
  }
  std::shared_ptr<Arena> arena() override { return shm_->arena(); }
  std::vector<int> hosts() const override { return hosts_; }
  std::string address(int rank) const override { return tcp_.address(rank); }
  std::uint64_t calls(int rank) const override;
  void send_heartbeat() override { tcp_.send_heartbeat(); }
  std::vector<int> silent(double seconds) override { return tcp_.silent(seconds); }
  std::string describe(int rank) const override;
  TitledRank titled(int rank) const override { return tcp_.titled(rank); }
  void set_titles(const std::vector<std::string>& titles) override;
  void announce_message(int rank, const std::string& message) noexcept override {
    tcp_.announce_message(rank, message);
    shm_->announce_message(local_rank(rank), message);
  }

 private:
  friend class MixedEndpoint;
  // Returns true if all ranks are on this host.
  bool one_host() const { return shm_->size() == size(); }
  // Returns a rank's number in `shm_`; -1 if it is on another host.
  int local_rank(int rank) const { return local_ranks_[static_cast<std::size_t>(rank)]; }

  std::shared_ptr<ShmGroup> shm_;
  std::vector<int> hosts_, local_ranks_;
  TcpGroup tcp_;
  std::unique_ptr<Endpoint> endpoint_;
};

}  // namespace pycollective
