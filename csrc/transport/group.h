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

// A rank of a group, and its name in texts.
struct TitledRank {
  int rank;
  std::string title;
};

class Group {
 public:
  virtual ~Group() = default;
  virtual int size() const = 0;
  // The end of a rank that this process runs.
  virtual Endpoint& endpoint(int rank) = 0;
  // Fails the whole group, unless it has failed already: every rank's present or next call throws.
  virtual void fail(const Failure& failure) noexcept = 0;
  // Fails this group, a part of `whole` with these members, as that has failed; does nothing if it
  // has not.
  void fail_as(const Group& whole, const std::vector<int>& members);
  // A rank's ends of the pipes that messages between two ranks travel through; one object for each.
  virtual std::shared_ptr<Pipes> pipes(int rank) = 0;
  // Whether a rank has left in good order, as far as this one knows.
  virtual bool has_left(int /*rank*/) const { return false; }
  // Why the group is dead, if it is.
  virtual std::optional<Failure> failure() const = 0;
  // Returns true if it has one, as far as a look tells that every message can afford.
  virtual bool finds_failure() const { return failure().has_value(); }
  // Leaves in good order: not a failure, unless somebody still waits for this rank, or it shows
  // only now that this rank's calls and a peer's differ.
  virtual void leave(int rank) noexcept = 0;
  // The same, for a rank that this process runs. Throws the mismatch that the group has failed
  // with, unless a call of the rank has thrown it.
  void close(int rank);
  // Lets go of what a forked child has inherited, without a word to the peers.
  virtual void abandon() noexcept {}
  // What moves the bytes, in words.
  virtual std::string_view transport() const = 0;
  // Where this rank makes arrays that the ranks of its host reach; nullptr where there is nothing
  // to gain, or no address space.
  virtual std::shared_ptr<Arena> arena() { return nullptr; }
  // For each rank, the number of its host; ranks of one number share memory.
  virtual std::vector<int> hosts() const {
    return std::vector<int>(static_cast<std::size_t>(size()), 0);
  }
  // Whether this rank's host has more ranks than cores for them, as far as it is known now.
  virtual bool in_crowd() const = 0;
  // The numeric address of a rank that is reached at another one than this rank's; else empty.
  virtual std::string address(int /*rank*/) const { return {}; }
  // The rank with its title: "rank 1", or as call_ranks() has it "rank 1 (worker 1 at 10.0.0.2)".
  virtual TitledRank titled(int rank) const;
  std::string title(int rank) const { return titled(rank).title; }
  virtual void call_ranks(const std::vector<std::string>& titles);
  // Collective calls that a rank has begun, as far as this one knows.
  virtual std::uint64_t calls(int rank) const = 0;
  // Tells the others that this process runs, and which call its rank is in. A rank that waits does
  // so every kBeat, so that a process that is stopped or cut off is known by its silence.
  virtual void beat() {}
  // The ranks that have not been heard of for so many seconds, nor left in good order; from the
  // first beat on.
  virtual std::vector<int> silent(double /*seconds*/) { return {}; }
  // What a rank is doing: "rank 0 is in …".
  virtual std::string describe(int rank) const = 0;
  // Tells the others in which message between two ranks this rank waits; in none, where it is
  // empty.
  virtual void announce_message(int /*rank*/, const std::string& /*message*/) noexcept {}
  // The same of all ranks: "rank 0 is in …; rank 1 has …".
  std::string describe_ranks() const;

 private:
  // The number by which texts and failures name a rank.
  virtual int number(int rank) const { return rank; }

  mutable std::mutex titles_mutex_;
  std::vector<std::string> titles_;  // empty, or of all ranks
};

// A failure of a group as a part of it tells it. The members are the numbers in that group of the
// part's ranks, which the text keeps.
Failure as_told_by_part(const Failure& failure, const std::vector<int>& members);

// The title of one rank, or "ranks 1, 2".
std::string list_ranks(const Group& group, const std::vector<int>& ranks);

// "rank 1 is in all_reduce #3 (…)", from what is recorded of a rank's last call, and of the message
// in which it waits.
std::string describe_rank(const std::string& title, bool busy, const CallRecord& call,
                          const std::string& message);

// A deadline that passed: "rank 0 waited until its deadline for rank 2, which has not come to this
// call. rank 0 is in …".
// Ranks that wait are heard of: one that is silent holds up the others. `awaited`: the ranks that
// this rank itself waits for, which the text names if no rank is known to be silent.
Failure timeout_of(Group& group, int rank, const std::vector<int>& awaited, const CallRecord& call);

// The loss of a peer that has left: "rank 1 has left the group after 2 calls, while rank 0 is in
// …".
Failure absence_of(const TitledRank& peer, std::uint64_t calls, const TitledRank& me,
                   const CallRecord& call);

// A call of a rank as it is told to others.
struct KnownCall {
  KnownCall(const CallRecord& call)
      : number(call.number), fingerprint(call.fingerprint), text(call.describe()) {}
  KnownCall(std::uint64_t number, std::uint64_t fingerprint, std::string text)
      : number(number), fingerprint(fingerprint), text(std::move(text)) {}
  std::uint64_t number, fingerprint;
  std::string text;
};
// Calls of a rank, in any order.
using KnownCalls = std::vector<KnownCall>;
// All that a history has, the last call first.
KnownCalls known_calls(const CallHistory& history);

// The first call in which two ranks are known to differ.
struct Difference {
  const KnownCall *mine = nullptr, *theirs = nullptr;  // nullptr: none is known
  bool is_first = false;  // no call before it differs, as far as hashes tell
};
Difference find_difference(const KnownCalls& mine, const KnownCalls& theirs);

// A mismatch between two ranks' calls. It names the first calls that differ, else the last ones.
Failure mismatch_of(const TitledRank& me, const KnownCalls& mine, const TitledRank& peer,
                    const KnownCalls& theirs);

}  // namespace pycollective
