// A group of processes of one host, through shared memory (shm_memory.h). A process needs the
// memory's descriptor to join.
//
// A failure is a record in the memory. A rank that gives up writes it; for a rank that was killed,
// the process that watches the ranks (`pycollective run`) writes it.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/origin.h"
#include "transport/arena.h"
#include "transport/group.h"
#include "transport/shm_memory.h"

namespace pycollective {

class ShmEndpoint;

class ShmGroup final : public Group {
 public:
  // Creates the memory of a group of `size` ranks. `arena`: the address space of each rank's arena;
  // 0 for a part of another group, which uses the other group's arenas.
  static std::shared_ptr<ShmGroup> create(int size, std::size_t arena);
  // Maps the memory of a descriptor. Throws std::invalid_argument if it has no group.
  static std::shared_ptr<ShmGroup> open(int descriptor);
  explicit ShmGroup(ShmMemory memory);
  ~ShmGroup() override;

  int size() const override { return memory_.size(); }
  int descriptor() const { return memory_.descriptor(); }
  // Joins as a rank. A part of another group must call follow() before. Throws
  // std::invalid_argument if there is no such rank, or if another process has it.
  void join(int rank);
  void leave(int rank) noexcept override;
  std::shared_ptr<Arena> arena() override { return arena_; }
  std::string_view transport() const override { return "shared memory"; }
  bool is_oversubscribed() const override;
  // Returns true if each rank can read the ordinary memory of all ranks by read_remote().
  bool all_read_remotely() const;
  // The way of this rank's ordinary array in its last long call.
  CopyWay copy_way() const { return copy_.way; }
  // Returns the ranks whose wake-up costs their peers a fence (WaitQueue::interrupts).
  std::vector<int> needing_fences() const;
  // Sets the ranks' numbers in the larger group that this group belongs to, in ascending order, and
  // the addresses of the larger group's ranks (Group::address).
  void name_ranks(std::vector<int> names, std::vector<std::string> addresses) {
    names_ = std::move(names);
    addresses_ = std::move(addresses);
  }
  // Makes this group a part of another group: it uses the other group's arenas, and loses the
  // processes that the other group loses.
  void follow(std::shared_ptr<ShmGroup> other) { followed_ = std::move(other); }
  // For a part of a MixedGroup, whose ranks may sleep in a poll() over connections. Sets the
  // function that ends a peer's poll(), and announces that this rank's next sleep is in a poll().
  void end_polls_by(std::function<void(int)> end_poll) { end_poll_ = std::move(end_poll); }
  void set_in_poll(bool in_poll) { state(rank_).queue.set_in_poll(in_poll); }
  void end_poll(int rank) const {
    if (end_poll_) end_poll_(rank);
  }
  // Returns true if the rank has joined and not left.
  bool is_in(int rank) const;

  Endpoint& endpoint(int rank) override;
  void fail(const Failure& failure) noexcept override;
  std::optional<Failure> failure() const override;
  bool finds_failure() const override { return has_failed(); }
  std::shared_ptr<Pipes> pipes(int rank) override;
  bool has_left(int rank) const override;
  std::uint64_t calls(int rank) const override;
  void send_heartbeat() override;
  std::vector<int> silent(double seconds) override;
  std::string describe(int rank) const override;
  void announce_message(int rank, const std::string& message) noexcept override;

  // For ShmEndpoint.
  const ShmMemory& memory() const { return memory_; }
  // Returns the handle of an array in this rank's arena; 0 if it is not there, or if a rank has not
  // mapped the arenas.
  std::uint64_t handle_of(const void* data, std::size_t bytes) const;
  // Returns the address of a peer's array; nullptr if the handle is invalid.
  std::byte* address_of(int rank, std::uint64_t handle, std::size_t bytes) const;
  // As in Board.
  CopyWay begin_long_call(Collective collective, std::size_t bytes, CopyWay last);
  void end_long_call(Clock::time_point began);
  CopyWay begin_long_message(int to, std::size_t bytes);
  void end_long_message(std::size_t bytes, CopyWay way, Clock::time_point began);
  std::uint64_t remote_address(const void* data) const;
  // Reads ordinary memory of a peer by a system call. Returns false if that fails.
  bool read_remote(int rank, std::uint64_t address, std::byte* to, std::size_t bytes) const;
  bool has_failed() const;
  void check() const;
  int number(int rank) const override {
    return names_.empty() ? rank : names_[static_cast<std::size_t>(rank)];
  }

 private:
  void map_arenas();
  // Tests once, after all ranks have joined, if this rank can read the memory of all ranks.
  void test_remote_reads();
  // Chooses the way of copying of the next call or message of a kind (CopyTimes), at most `last`.
  struct CopyTrial {
    CopyWay way;
    bool is_timed;
    bool is_checked;
  };
  CopyTrial next_copy(int kind, std::size_t bytes, CopyWay last);
  CopyWay fastest(int kind, int size_class) const;
  std::atomic<float>& copy_time(int rank, int kind, int size_class, CopyWay way) const;
  // Returns the index of a rank's arena in the followed group, or in this one.
  int arena_of(int rank) const;
  // Returns true if every rank has mapped every arena.
  bool all_mapped() const;
  ShmRank& state(int rank) const { return memory_.rank(rank); }
  // The failure that a rank has recorded in the memory. Needs has_failed().
  Failure recorded_failure() const;
  // The failure of the followed group because of a lost rank.
  std::optional<Failure> failure_of_followed() const;
  // The call, or else the message, in which this process's rank is; empty: none.
  std::string own_call() const;
  // The message in which a rank waits; empty: none.
  std::string message_of(int rank) const;
  // Returns true if the rank's process is known to have ended.
  bool has_ended(int rank) const;
  void wake_all() noexcept;

  const Origin origin_;
  const std::uint64_t secret_;  // identifies this process's memory (PeerMemory)
  const ShmMemory memory_;
  mutable std::atomic<int> oversubscribed_ =
      -1;                         // cache of is_oversubscribed(); -1: not all ranks have joined
  std::shared_ptr<Arena> arena_;  // nullptr: none, or too little address space
  mutable std::atomic<int> all_mapped_ =
      -1;  // cache of all_mapped(); -1: not all ranks have joined
  // This rank's way of copying, for each kind and size.
  struct CopyChoice {
    int turn = 0;  // of its period
    CopyWay way = CopyWay::plain;
    int slow = 0;                        // checked calls in a row that were slow
    std::uint64_t calls = 0, retry = 0;  // begun calls; the last one of copy_retries
  };
  CopyChoice choices_[kCopyKinds][kCopySizes];
  // The present long call, or the last one.
  int kind_ = 0;
  std::size_t bytes_ = 0;
  CopyTrial copy_{};
  std::unique_ptr<ShmEndpoint> endpoint_;
  std::vector<int> names_;
  std::vector<std::string> addresses_;
  int rank_ = -1;
  std::function<void(int)> end_poll_;
  struct Heartbeats {
    std::uint64_t heartbeats;
    Clock::time_point at;
  };
  void receive_heartbeats();
  std::mutex heartbeats_mutex_;
  std::vector<Heartbeats> heartbeats_;  // of each rank, since this rank's first heartbeat
  std::shared_ptr<ShmGroup> followed_;
};

}  // namespace pycollective
