// Ranks that are processes of one host, through shared memory.
//
// Every ordered pair of ranks has a channel: a ring of kShmSlots slots of kShmSlotBytes each. A
// sender copies its message in, part by part as there is room; the receiver reduces or copies
// straight out of the ring. Small messages travel in the slot's own cache lines; what lies in the
// arena (arena.h) is lent: the receiver reads it where it is. Whoever waits sleeps on a futex
// in the shared memory. Whoever holds the descriptor of the memory may join, and
// nobody else.
//
// A failure is written into the memory, so that all ranks hear of it: a rank that gives up writes
// its own; for one that is killed, whoever watches the processes (`pycollective run`) writes it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/origin.h"
#include "support/shared_memory.h"
#include "transport/arena.h"
#include "transport/board.h"
#include "transport/group.h"

namespace pycollective {

class ShmEndpoint;

class ShmGroup final : public Group {
 public:
  // Makes the memory of a group of `size` ranks, each of which has an arena of so many bytes of
  // address space; 0: parts of a group use those of the whole.
  static std::shared_ptr<ShmGroup> create(int size, std::size_t arena);
  // Maps the memory behind a descriptor. Throws std::invalid_argument if no group is in it.
  static std::shared_ptr<ShmGroup> open(int descriptor);
  ~ShmGroup() override;

  int size() const override { return size_; }
  int descriptor() const { return memory_.descriptor(); }
  // Takes the place of a rank, after follow() if this is a part of another group; throws
  // std::invalid_argument if it is taken or there is none.
  void join(int rank);
  void leave(int rank) noexcept override;
  std::shared_ptr<Arena> arena() override { return arena_; }
  std::string_view transport() const override { return "shared memory"; }
  bool in_crowd() const override;
  // The ranks whose wake-up costs their peers a fence, because they may not interrupt them.
  std::vector<int> needing_fences() const;
  // What messages call the ranks, where they are part of a larger group; in ascending order.
  void name_ranks(std::vector<int> names) { names_ = std::move(names); }
  // A process that is lost to another group, of which this is a part, is lost to this one as well;
  // the arenas are those of the other group.
  void follow(std::shared_ptr<ShmGroup> other) { followed_ = std::move(other); }
  // Whether the rank has joined and not left.
  bool is_in(int rank) const;

  Endpoint& endpoint(int rank) override;
  void fail(FailureKind kind, const std::string& message) noexcept override;
  std::optional<Failure> failure() const override;
  bool finds_failure() const override { return has_failed(); }
  std::shared_ptr<Pipes> pipes(int rank) override;
  bool has_left(int rank) const override;
  std::uint64_t calls(int rank) const override;
  void beat() override;
  std::vector<int> silent(double seconds) override;
  std::string describe(int rank) const override;
  void tell_message(int rank, const std::string& message) noexcept override;

 private:
  friend class ShmEndpoint;
  friend class ShmBoard;
  struct Header;
  struct RankState;
  struct Channel;

  ShmGroup(SharedMemory memory, Mapping mapping, int size, std::size_t arena);
  static std::size_t bytes_for(int size);
  void map_arenas();
  std::uint64_t place_of(const void* data, std::size_t bytes) const;
  std::byte* reach(int rank, std::uint64_t place, std::size_t bytes) const;
  // The place of a rank's arena among those of the whole group.
  int arena_of(int rank) const;
  // Whether every rank reaches every arena.
  bool all_reach() const;
  Header& header() const;
  RankState& state(int rank) const;
  Channel& channel(int from, int to) const;
  std::byte* slots(int from, int to) const;
  std::byte* board() const;
  std::vector<WaitQueue*> queues() const;
  CallRecord call_of(int rank, std::uint64_t number) const;
  KnownCalls calls_of(int rank) const;
  // Returns true if the rank's process is known to have ended, in this group or the followed one.
  bool has_ended(int rank) const;
  bool has_failed() const;
  void check() const;
  int name(int rank) const {
    return names_.empty() ? rank : names_[static_cast<std::size_t>(rank)];
  }

  const Origin origin_;
  SharedMemory memory_;
  Mapping mapping_;
  int size_;
  std::size_t arena_bytes_;                // of each rank
  mutable std::atomic<int> crowd_ = -1;    // whether it is one, once all ranks have joined
  std::shared_ptr<Arena> arena_;           // nullptr: there is none, or no address space for it
  mutable std::atomic<int> reaches_ = -1;  // whether all ranks have mapped all arenas, once known
  std::unique_ptr<ShmEndpoint> endpoint_;  // of the rank that this process has
  std::vector<int> names_;
  int rank_ = -1;
  struct Heard {
    std::uint64_t beats;
    Clock::time_point at;
  };
  void hear();
  std::mutex heard_mutex_;
  std::vector<Heard> heard_;  // of each rank, since this one's first beat
  std::shared_ptr<ShmGroup> followed_;
};

}  // namespace pycollective
