// A group of which some ranks share a host: those talk through shared memory, all others over TCP.
//
// Every two ranks have a control connection, so that the end of a process is noticed wherever it
// was; messages between ranks of this host go through the memory. A call is entered in both, and a
// failure of one is the failure of the other. A rank that waits for both sleeps in one poll() over
// its connections: a rank of its host that has done something in the memory ends it by a frame on
// the control connection of the two.
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
  // `streams` and `pipes` as TcpGroup's, with nothing but the control connection among the streams
  // to ranks of this host; hosts[r] is the number of rank r's host. `memory`, which this rank has
  // joined, has the ranks of its host in their order. Throws std::invalid_argument.
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
  // Addresses may tell of more ranks that share the cores than the memory does: those of other
  // containers.
  bool in_crowd() const override {
    return shm_->in_crowd() || (tcp_.here() > shm_->size() && tcp_.in_crowd());
  }
  std::shared_ptr<Arena> arena() override { return shm_->arena(); }
  std::vector<int> hosts() const override { return hosts_; }
  std::string address(int rank) const override { return tcp_.address(rank); }
  std::uint64_t calls(int rank) const override;
  // All ranks have control connections, also those of one host.
  void beat() override { tcp_.beat(); }
  std::vector<int> silent(double seconds) override { return tcp_.silent(seconds); }
  std::string describe(int rank) const override;
  TitledRank titled(int rank) const override { return tcp_.titled(rank); }
  void call_ranks(const std::vector<std::string>& titles) override;
  void announce_message(int rank, const std::string& message) noexcept override {
    tcp_.announce_message(rank, message);
    shm_->announce_message(place(rank), message);
  }

 private:
  friend class MixedEndpoint;
  // Whether the memory has all ranks.
  bool one_host() const { return shm_->size() == size(); }
  // The rank's place in the memory, -1 where it is on another host.
  int place(int rank) const { return places_[static_cast<std::size_t>(rank)]; }

  std::shared_ptr<ShmGroup> shm_;
  std::vector<int> hosts_, places_;
  TcpGroup tcp_;
  std::unique_ptr<Endpoint> endpoint_;
};

}  // namespace pycollective
