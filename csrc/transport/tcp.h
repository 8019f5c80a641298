// Ranks that are processes of any hosts, over TCP.
//
// Every pair of ranks has two or more connections. The first carries control frames only: what a
// rank is in that waits, or beats, the failure of a rank, and a rank's leave; they are never held
// up by data. The others carry messages, in parts, in turns. Who connects and proves to be a member
// is not decided here (pycollective/rendezvous); what comes from a peer is checked all the same,
// and no length in it is believed beyond the bounds of this file.
//
// A message is written from the sender's own memory, which must stay until flushed(). The receiver
// reads each part into a buffer that is kept, and reduces or copies out of it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/group.h"

namespace pycollective {

class TcpGroup final : public Group {
 public:
  // streams[p] are connected sockets to rank p in an order that both sides have, the control
  // connection first; empty for this rank. `pipes` has one more for each peer, -1 for this rank; or
  // nothing where messages between two ranks are not needed. All are duplicated. A peer that gets
  // collectives' messages in another way has a control connection only; `others` says that there
  // may be such peers. Throws std::invalid_argument.
  TcpGroup(int rank, const std::vector<std::vector<int>>& streams,
           const std::vector<int>& pipes = {}, bool others = false);
  ~TcpGroup() override;
  TcpGroup(const TcpGroup&) = delete;
  TcpGroup& operator=(const TcpGroup&) = delete;

  int rank() const;
  // Tells the others that this rank leaves, and closes the connections.
  void leave(int rank) noexcept override;
  // Closes the connections: a copy of one in a forked child would keep the peers from seeing that
  // the parent ends.
  void abandon() noexcept override;
  std::string_view transport() const override { return "TCP"; }

  int size() const override;
  Endpoint& endpoint(int rank) override;
  void fail(const Failure& failure) noexcept override;
  std::optional<Failure> failure() const override;
  std::shared_ptr<Pipes> pipes(int rank) override;
  bool has_left(int rank) const override;
  std::string address(int rank) const override;
  std::vector<std::string> addresses() const;
  bool in_crowd() const override;
  std::uint64_t calls(int rank) const override;
  void beat() override;
  std::vector<int> silent(double seconds) override;
  std::string describe(int rank) const override;
  TitledRank titled(int rank) const override;
  void call_ranks(const std::vector<std::string>& titles) override;
  void announce_message(int rank, const std::string& message) noexcept override;
  // Ends the poll() in which a rank sleeps.
  void wake(int rank) noexcept;
  // What is not said to be on one host is not.
  std::vector<int> hosts() const override;

  // FailureDetector::also_ask.
  void also_ask(std::function<std::string(int)> describe);
  // The number of ranks at this rank's address.
  int here() const;

 private:
  class Member;
  std::unique_ptr<Member> member_;
  std::shared_ptr<Pipes> pipes_;
};

}  // namespace pycollective
