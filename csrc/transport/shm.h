// Ranks that are processes of one host, through shared memory (shm_memory.h). Whoever holds the
// descriptor of the memory may join, and nobody else.
//
// All ranks read a failure in the memory. A rank that gives up writes its own; for one that is
// killed, the process that watches the others (`pycollective run`) writes it.
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
  // Makes the memory of a group of `size` ranks, each of which has an arena of so many bytes of
  // address space; 0: parts of a group use those of the whole.
  static std::shared_ptr<ShmGroup> create(int size, std::size_t arena);
  // Maps the memory behind a descriptor. Throws std::invalid_argument if no group is in it.
  static std::shared_ptr<ShmGroup> open(int descriptor);
  explicit ShmGroup(ShmMemory memory);
  ~ShmGroup() override;

  int size() const override { return memory_.size(); }
  int descriptor() const { return memory_.descriptor(); }
  // Takes the place of a rank, after follow() if this is a part of another group; throws
  // std::invalid_argument if it is taken or there is none.
  void join(int rank);
  void leave(int rank) noexcept override;
  std::shared_ptr<Arena> arena() override { return arena_; }
  std::string_view transport() const override { return "shared memory"; }
  bool in_crowd() const override;
  // Returns true if each rank is known to be able to read the ordinary memory of all ranks.
  bool all_read() const;
  // The ranks whose wake-up costs their peers a fence, because they may not interrupt them.
  std::vector<int> needing_fences() const;
  // Gives the ranks, in ascending order, their numbers in a larger group, whose ranks have these
  // addresses (Group::address).
  void name_ranks(std::vector<int> names, std::vector<std::string> addresses) {
    names_ = std::move(names);
    addresses_ = std::move(addresses);
  }
  // A process that is lost to another group, of which this is a part, is lost to this one as well;
  // the arenas are those of the other group.
  void follow(std::shared_ptr<ShmGroup> other) { followed_ = std::move(other); }
  // A rank of a larger group sleeps in a poll() where it also waits for connections: how to end the
  // poll() of a peer, and the announcement that the next sleep of this rank is in one.
  void end_polls_by(std::function<void(int)> end_poll) { end_poll_ = std::move(end_poll); }
  void set_in_poll(bool in_poll) { state(rank_).queue.set_in_poll(in_poll); }
  void end_poll(int rank) const {
    if (end_poll_) end_poll_(rank);
  }
  // Whether the rank has joined and not left.
  bool is_in(int rank) const;

  Endpoint& endpoint(int rank) override;
  void fail(const Failure& failure) noexcept override;
  std::optional<Failure> failure() const override;
  bool finds_failure() const override { return has_failed(); }
  std::shared_ptr<Pipes> pipes(int rank) override;
  bool has_left(int rank) const override;
  std::uint64_t calls(int rank) const override;
  void beat() override;
  std::vector<int> silent(double seconds) override;
  std::string describe(int rank) const override;
  void announce_message(int rank, const std::string& message) noexcept override;

  // For this process's endpoint.
  const ShmMemory& memory() const { return memory_; }
  // Returns the place of an array in this rank's arena, for peers to reach; 0: it is not there.
  std::uint64_t place_of(const void* data, std::size_t bytes) const;
  // Returns the address of a peer's array by its place; nullptr if the peer has no such memory.
  std::byte* reach(int rank, std::uint64_t place, std::size_t bytes) const;
  // Returns how peers name an ordinary array that they read through the system; 0: they cannot, or
  // the way through the staging is as fast. Finds out, when all ranks have joined, whether this one
  // can read.
  std::uint64_t lend(const void* data, std::size_t bytes);
  // Reads what a peer has lent. Returns false if it has no such memory.
  bool read(int rank, std::uint64_t lent, std::byte* to, std::size_t bytes) const;
  bool has_failed() const;
  void check() const;
  int number(int rank) const override {
    return names_.empty() ? rank : names_[static_cast<std::size_t>(rank)];
  }

 private:
  void map_arenas();
  // The place of a rank's arena among those of the whole group.
  int arena_of(int rank) const;
  // Whether every rank reaches every arena.
  bool all_reach() const;
  ShmRank& state(int rank) const { return memory_.rank(rank); }
  // Returns true if the rank's process is known to have ended, in this group or the followed one.
  bool has_ended(int rank) const;
  void wake_all() noexcept;

  const Origin origin_;
  const std::uint64_t secret_;  // which peers find in this process's memory
  const ShmMemory memory_;
  mutable std::atomic<int> crowd_ = -1;    // whether it is one, once all ranks have joined
  std::shared_ptr<Arena> arena_;           // nullptr: there is none, or no address space for it
  mutable std::atomic<int> reaches_ = -1;  // whether all ranks have mapped all arenas, once known
  std::unique_ptr<ShmEndpoint> endpoint_;  // of the rank that this process has
  std::vector<int> names_;
  std::vector<std::string> addresses_;
  int rank_ = -1;
  std::function<void(int)> end_poll_;
  struct Heartbeats {
    std::uint64_t beats;
    Clock::time_point at;
  };
  void receive_heartbeats();
  std::mutex heartbeats_mutex_;
  std::vector<Heartbeats> heartbeats_;  // of each rank, since this one's first beat
  std::shared_ptr<ShmGroup> followed_;
};

}  // namespace pycollective
