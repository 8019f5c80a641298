// A group of ranks over some transport.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "transport/pipes.h"
#include "transport/transport.h"

namespace pycollective {

class Arena;

// A rank and its name in texts.
struct TitledRank {
  int rank;
  std::string title;
};

class Group {
 public:
  virtual ~Group() = default;
  virtual int size() const = 0;
  // Returns the endpoint of a rank of this process.
  virtual Endpoint& endpoint(int rank) = 0;
  // Fails the whole group, unless it has failed already. The present or next call of every rank
  // throws.
  virtual void fail(const Failure& failure) noexcept = 0;
  // Fails this group if `whole` has failed. This group was split from `whole`; its ranks are
  // `members` there.
  void fail_as(const Group& whole, const std::vector<int>& members);
  // Returns a rank's pipes for point-to-point messages.
  virtual std::shared_ptr<Pipes> pipes(int rank) = 0;
  // Returns true if a rank is known to have left normally.
  virtual bool has_left(int /*rank*/) const { return false; }
  // Returns the group's failure, if it has failed.
  virtual std::optional<Failure> failure() const = 0;
  // Returns true if the group has failed. A cheap check for every message; it may detect the
  // failure later than failure().
  virtual bool finds_failure() const { return failure().has_value(); }
  // Leaves the group normally. The group fails if a peer still waits for this rank, or if this
  // rank's calls turn out to differ from a peer's.
  virtual void leave(int rank) noexcept = 0;
  // Leaves as a rank of this process. If the group failed with a mismatch that no call of the rank
  // has thrown, throws the mismatch.
  void close(int rank);
  // In a forked child: closes inherited connections without notifying the peers.
  virtual void abandon() noexcept {}
  // Returns the name of the transport.
  virtual std::string_view transport() const = 0;
  // Returns this rank's arena; nullptr for ranks that are threads, or without the address space.
  virtual std::shared_ptr<Arena> arena() { return nullptr; }
  // Returns the host number of each rank. Ranks with equal numbers share memory.
  virtual std::vector<int> hosts() const {
    return std::vector<int>(static_cast<std::size_t>(size()), 0);
  }
  // Returns true if this rank's host is known to have more ranks than usable cores.
  virtual bool is_oversubscribed() const = 0;
  // Returns the numeric address of a rank on another host; empty for this host.
  virtual std::string address(int /*rank*/) const { return {}; }
  // Returns a rank with its title: "rank 1", or the title of set_titles(), such as
  // "rank 1 (worker 1 at 10.0.0.2)".
  virtual TitledRank titled(int rank) const;
  std::string title(int rank) const { return titled(rank).title; }
  virtual void set_titles(const std::vector<std::string>& titles);
  // Returns the number of collective calls that a rank is known to have begun.
  virtual std::uint64_t calls(int rank) const = 0;
  // Sends the peers a heartbeat with this rank's present call. A waiting rank does so every
  // kHeartbeatInterval. A waiting rank without heartbeats is stopped or disconnected.
  virtual void send_heartbeat() {}
  // Returns the ranks that sent no heartbeat for this many seconds, counted from this rank's first
  // heartbeat on, and have not left.
  virtual std::vector<int> silent(double /*seconds*/) { return {}; }
  // Describes what a rank is doing: "rank 0 is in …".
  virtual std::string describe(int rank) const = 0;
  // Tells the peers the point-to-point message in which this rank waits. Empty: in none.
  virtual void announce_message(int /*rank*/, const std::string& /*message*/) noexcept {}
  // Describes all ranks: "rank 0 is in …; rank 1 has …".
  std::string describe_ranks() const;

 private:
  // Returns a rank's number in texts and failures.
  virtual int number(int rank) const { return rank; }

  mutable std::mutex titles_mutex_;
  std::vector<std::string> titles_;  // empty, or one for each rank
};

// Converts a group's failure for a part of the group, whose ranks are `members` of the group. The
// failure's ranks become ranks of the part; its text keeps the group's numbers.
Failure failure_for_part(const Failure& failure, const std::vector<int>& members);

// The title of one rank, or "ranks 1, 2".
std::string list_ranks(const Group& group, const std::vector<int>& ranks);

// Formats a rank's last call and the point-to-point message in which it waits: "rank 1 is in
// all_reduce #3 (…)".
std::string describe_rank(const std::string& title, bool busy, const CallRecord& call,
                          const std::string& message);

// Returns the failure of a call at its deadline: "rank 0 waited until its deadline for rank 2,
// which has not entered this call. rank 0 is in …". The text names the ranks that caused the delay:
// the ranks without heartbeats, because waiting ranks send them. If all ranks send heartbeats, the
// text names the ranks that have not entered the call. If there are none, it names `awaited`, the
// ranks for which this rank waits.
Failure timeout_failure(Group& group, int rank, const std::vector<int>& awaited,
                        const CallRecord& call);

// Returns the failure of a call whose peer has left: "rank 1 has left the group after 2 calls,
// while rank 0 is in …".
Failure peer_left_failure(const TitledRank& peer, std::uint64_t calls, const TitledRank& me,
                          const CallRecord& call);

// A rank's call, as far as a peer knows it.
struct KnownCall {
  KnownCall(const CallRecord& call)
      : number(call.number), fingerprint(call.fingerprint), text(call.describe()) {}
  KnownCall(std::uint64_t number, std::uint64_t fingerprint, std::string text)
      : number(number), fingerprint(fingerprint), text(std::move(text)) {}
  std::uint64_t number, fingerprint;
  std::string text;
};
// A rank's calls, in any order.
using KnownCalls = std::vector<KnownCall>;
// Returns all calls of a history, the last call first.
KnownCalls known_calls(const CallHistory& history);

// The first call that is known to differ between two ranks.
struct Difference {
  const KnownCall *mine = nullptr, *theirs = nullptr;  // nullptr: no call is known to differ
  bool is_first = false;  // the fingerprints of the call before it are equal
};
Difference find_difference(const KnownCalls& mine, const KnownCalls& theirs);

// Returns the mismatch of two ranks' calls. It names the first calls that differ; if they are not
// known, the last calls.
Failure mismatch_failure(const TitledRank& me, const KnownCalls& mine, const TitledRank& peer,
                         const KnownCalls& theirs);

}  // namespace pycollective
