// The failure detector of a rank over TCP: what the rank tells its peers over the control
// connections, what the peers tell it, and what follows from that.
//
// A rank tells the call in which it waits, heartbeats, a failure of the group, and its leave. The
// rank compares the peers' calls with its own. The end of a control connection without a leave
// means that the peer is lost.
#pragma once

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "support/origin.h"
#include "support/waiter.h"
#include "transport/group.h"
#include "transport/sockets.h"
#include "transport/tcp_control.h"

namespace pycollective::tcp {

class FailureDetector {
 public:
  // streams[r] are the sockets to rank r, the control connection first. Throws
  // std::invalid_argument.
  FailureDetector(int rank, const std::vector<std::vector<int>>& streams);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }
  // Ranks at this rank's address.
  int here() const { return here_; }
  const std::string& address(int peer) const { return at(peer).address; }
  std::vector<std::string> addresses() const;

  // This rank's calls --------------------------------------------------------------------------

  // Begins a call. Throws std::logic_error if the rank is in one already, or has left the group.
  void enter(const CallRecord& call);
  void leave_call() noexcept { in_call_.store(false); }
  // The present call. For the thread that is in it.
  const CallRecord& call() const { return call_; }
  // Tells the peers once in each call what this rank is in.
  void announce_call();

  // Failures -----------------------------------------------------------------------------------

  bool has_failed() const { return failed_.load(); }
  std::optional<Failure> failure();
  // Throws the group's failure. check_now() first receives what has come, if that is long ago.
  void check();
  void check_now();
  void fail(const Failure& failure) noexcept;
  // A message of a peer does not belong to this rank's call: fails the group, and throws.
  [[noreturn]] void fail_mismatch(int peer);
  // A connection for messages broke then. The control connection may say why: throws once it has,
  // or once the time for that is over.
  void check_broken(int peer, Clock::time_point since);
  // A message told which call the peer is in.
  void record_call(int peer, KnownCall call);

  // Receives what has come over the control connections.
  void receive();
  // Adds the descriptors that become readable when there is something to receive; and returns after
  // poll() whether there is.
  void add_polled(std::vector<pollfd>& polled) const;
  bool is_ready(const std::vector<pollfd>& polled);

  // For the group (group.h) ---------------------------------------------------------------------

  bool has_left(int peer);
  std::uint64_t calls(int peer) const;
  std::string title(int peer) const;
  void call_ranks(const std::vector<std::string>& titles);
  std::string describe(int peer);
  // Another transport of the group, which may know what a peer is doing; else it returns no text.
  void also_ask(std::function<std::string(int)> describe);
  void announce_message(const std::string& message) noexcept;
  // Ends the poll() in which a peer sleeps.
  void wake(int peer) noexcept;
  void beat();
  std::vector<int> silent(double seconds);
  // Leaves in good order, and closes the connections, unless another thread is in a call, which
  // then fails. Returns true if this call closed them. A mismatch that shows only now fails the
  // group.
  bool leave() noexcept;
  // Closes the connections. No call begins any more.
  void close() noexcept;

 private:
  struct Peer {
    std::string title;    // "rank 1 (10.0.0.2)", or as call_ranks() has it
    std::string address;  // if it is not this rank's
    ControlChannel control;
    bool left = false;
    std::uint64_t calls = 0;           // when it left
    KnownCall from_message{0, 0, ""};  // The last call that a message told.
    KnownCall waiting{0, 0, ""};       // The last call that it waited in, as it said.
    KnownCall over{0, 0, ""};          // The last call that it completed, as it said in none.
    std::string message;               // between two ranks, in which it waits
    KnownCalls sent_calls;             // all of its last calls, if it has said so
    Clock::time_point asked_at{};      // when this rank told it all of its own
    bool beats = false;
    Clock::time_point received_at{};  // what came last over the control connection
  };

  Peer& at(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  const Peer& at(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }
  static std::string describe_peer(const Peer& peer);
  static KnownCalls calls_of(const Peer& peer);
  Failure loss_of(int rank, const char* how) const;
  Failure mismatch_with(int rank, const KnownCalls& theirs) const;

  // With the mutex held, as all that follow.
  void send_to_all(const Header& header, const std::string& text) noexcept;
  void receive_frames();
  void receive_from(int rank);
  // Returns false if the frame is none.
  bool handle(int rank, const ControlFrame& frame);
  // Compares the peers' calls with this rank's.
  void compare_calls();
  bool differs(const Peer& peer) const;
  void compare_at_end();
  void fail_differing(int rank);
  void fail_locked(const Failure& failure, bool send_to_others) noexcept;
  void send_failure() noexcept;

  const int rank_;
  const Origin origin_;
  int here_ = 1;
  WakePipe wake_;  // another thread has failed the group
  std::atomic<bool> in_call_{false};
  bool announced_ = false;  // of the thread in a call

  mutable std::mutex mutex_;  // guards what follows
  std::vector<Peer> peers_;   // addresses never change
  CallHistory history_;       // written by the thread in a call, which reads it without
  CallRecord call_;           // the last of them
  std::string message_;       // between two ranks, in which this one waits
  std::atomic<Clock::time_point> received_at_{};
  std::vector<pollfd> polled_;
  std::function<std::string(int)> other_;  // also_ask()
  bool beats_ = false;
  std::optional<Failure> failure_;
  std::atomic<bool> failed_{false};
  bool closed_ = false;
};

}  // namespace pycollective::tcp
