// The failure detector of a rank over TCP. It exchanges control frames with the peers.
//
// A rank sends heartbeats, the call in which it waits, a failure of the group, and its leave. It
// compares its peers' calls with its own, and fails the group if they differ. A peer whose control
// connection ends without a leave is lost.
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
  // std::invalid_argument if they are not connected sockets.
  FailureDetector(int rank, const std::vector<std::vector<int>>& streams);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }
  // Returns the number of ranks at this rank's address.
  int here() const { return here_; }
  const std::string& address(int peer) const { return at(peer).address; }
  std::vector<std::string> addresses() const;

  // This rank's calls --------------------------------------------------------------------------

  // Begins a call. Throws std::logic_error if the rank is in one already, or has left the group.
  void enter(const CallRecord& call);
  void leave_call() noexcept { in_call_.store(false); }
  // Returns the current call. For the thread that makes it.
  const CallRecord& call() const { return call_; }
  // Announces the current call to the peers, once for each call.
  void announce_call();

  // Failures -----------------------------------------------------------------------------------

  bool has_failed() const { return failed_.load(); }
  std::optional<Failure> failure();
  // Throws the group's failure. check_now() first receives control frames, if the last receive()
  // was long ago.
  void check();
  void check_now();
  void fail(const Failure& failure) noexcept;
  // Fails the group because a peer's message belongs to another call, and throws.
  [[noreturn]] void fail_mismatch(int peer);
  // A connection for messages broke at time `since`. Throws the reason after the control connection
  // has delivered it; after a grace period, throws that the peer is lost.
  void check_broken(int peer, Clock::time_point since);
  // Records the call of a peer, which a message described.
  void record_call(int peer, KnownCall call);

  // Receives control frames.
  void receive();
  // add_polled() adds the descriptors for a poll(). After it, is_ready() returns true if there is
  // something to receive.
  void add_polled(std::vector<pollfd>& polled) const;
  bool is_ready(const std::vector<pollfd>& polled);

  // For the group (group.h) ---------------------------------------------------------------------

  bool has_left(int peer);
  std::uint64_t calls(int peer) const;
  std::string title(int peer) const;
  void set_titles(const std::vector<std::string>& titles);
  std::string describe(int peer);
  // Sets a function of another transport that describes what a peer is doing; empty: not known.
  void set_describe(std::function<std::string(int)> describe);
  void announce_message(const std::string& message) noexcept;
  // Ends the poll() in which a peer sleeps.
  void wake(int peer) noexcept;
  void send_heartbeat();
  std::vector<int> silent(double seconds);
  // Leaves the group normally and closes the connections. If another thread is in a call, fails
  // that call instead. Returns true if leave() closed the connections. Fails the group if the
  // peers' last calls differ from this rank's.
  bool leave() noexcept;
  // Closes the connections. Later calls fail.
  void close() noexcept;

 private:
  struct Peer {
    std::string title;    // "rank 1 (10.0.0.2)", or the title of set_titles()
    std::string address;  // empty if it equals this rank's
    ControlChannel control;
    bool left = false;
    std::uint64_t calls = 0;  // number of its calls when it left
    // Its last call that a message described, that an in_call frame described, and that an idle
    // frame described as completed.
    KnownCall from_message{0, 0, ""};
    KnownCall waiting{0, 0, ""};
    KnownCall over{0, 0, ""};
    std::string message;           // the point-to-point message in which it waits
    KnownCalls sent_calls;         // of its calls or left frame
    Clock::time_point asked_at{};  // when this rank sent it a calls frame
    bool sends_heartbeats = false;
    Clock::time_point received_at{};  // of the last control frame
  };

  Peer& at(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  const Peer& at(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }
  static std::string describe_peer(const Peer& peer);
  static KnownCalls calls_of(const Peer& peer);
  Failure loss_of(int rank, const char* how) const;
  Failure mismatch_with(int rank, const KnownCalls& theirs) const;

  // This function and those below need the mutex.
  void send_to_all(const Header& header, const std::string& text) noexcept;
  void receive_frames();
  void receive_from(int rank);
  // Returns false if the frame is invalid.
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
  WakePipe wake_;  // ends the poll() of a thread when another thread fails the group
  std::atomic<bool> in_call_{false};
  bool announced_ = false;  // used by the thread in a call

  mutable std::mutex mutex_;  // guards the members below
  std::vector<Peer> peers_;   // addresses never change
  CallHistory history_;       // the thread in a call writes it, and reads it without the mutex
  CallRecord call_;           // the last call
  std::string message_;       // the point-to-point message in which this rank waits
  std::atomic<Clock::time_point> received_at_{};
  std::vector<pollfd> polled_;
  std::function<std::string(int)> describe_elsewhere_;  // set_describe()
  bool sends_heartbeats_ = false;
  std::optional<Failure> failure_;
  std::atomic<bool> failed_{false};
  bool closed_ = false;
};

}  // namespace pycollective::tcp
