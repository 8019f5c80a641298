// A group of processes on any hosts, over TCP.
//
// Every pair of ranks has two or more connections. The first one is the control connection, for
// heartbeats, calls in which a rank waits, failures and leaves; data never delays them. The others
// carry the parts of messages, round robin. The rendezvous (pycollective/launch) makes and
// authenticates the connections. Frames from a peer are checked nevertheless, and their lengths are
// bounded (tcp_frame.h).
//
// A message is written from the sender's memory, which must stay unchanged until flushed(). The
// receiver reads each part into a staging buffer, and reduces or copies out of it; or it reads long
// parts directly to their target.
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
  // Duplicates all sockets. streams[p] has the connected sockets to rank p, with the control
  // connection first; both sides have the same order. For this rank it is empty. The sockets in
  // `pipes`, one for each peer, are for point-to-point messages; the entry of this rank is -1. The
  // list may be empty. With `others`, peers that use another transport may have a control
  // connection only. Throws std::invalid_argument.
  TcpGroup(int rank, const std::vector<std::vector<int>>& streams,
           const std::vector<int>& pipes = {}, bool others = false);
  ~TcpGroup() override;
  TcpGroup(const TcpGroup&) = delete;
  TcpGroup& operator=(const TcpGroup&) = delete;

  int rank() const;
  // Notifies the peers that this rank leaves, and closes the connections.
  void leave(int rank) noexcept override;
  // Closes the connections in a forked child. Otherwise its copies hide the parent's end from the
  // peers.
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
  bool is_oversubscribed() const override;
  std::uint64_t calls(int rank) const override;
  void send_heartbeat() override;
  std::vector<int> silent(double seconds) override;
  std::string describe(int rank) const override;
  TitledRank titled(int rank) const override;
  void set_titles(const std::vector<std::string>& titles) override;
  void announce_message(int rank, const std::string& message) noexcept override;
  // Ends the poll() in which a peer sleeps.
  void wake(int rank) noexcept;
  // Every rank counts as a host of its own.
  std::vector<int> hosts() const override;

  // Sets another source of describe() (FailureDetector::set_describe).
  void set_describe(std::function<std::string(int)> describe);
  // Returns the number of ranks at this rank's address.
  int here() const;

 private:
  class Member;
  std::unique_ptr<Member> member_;
  std::shared_ptr<Pipes> pipes_;
};

}  // namespace pycollective
