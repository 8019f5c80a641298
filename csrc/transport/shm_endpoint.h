// A rank's end of a group of processes.
//
// A sender copies its message into the channel's ring, a part for each free slot; the receiver
// reduces or copies straight out of the ring. Small messages travel in the slot's own cache lines;
// an array of the arena is lent: the receiver reads it where it is. A rank that waits sleeps on a
// futex in the shared memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "transport/board.h"
#include "transport/shm.h"

namespace pycollective {

class ShmEndpoint;

class ShmBoard final : public Board {
 public:
  explicit ShmBoard(ShmEndpoint& endpoint);
  std::uint64_t place_of(const void* data, std::size_t bytes) const override;
  std::byte* reach(int peer, std::uint64_t place, std::size_t bytes) override;
  std::uint64_t lend(const void* data, std::size_t bytes) override;
  void read(int peer, std::uint64_t lent, std::byte* to, std::size_t bytes) override;
  bool in_crowd() const override;
  [[noreturn]] void mismatch(int peer) override;

 private:
  ShmEndpoint& endpoint_;
};

class ShmEndpoint final : public Endpoint {
 public:
  ShmEndpoint(ShmGroup& group, int rank);

  int rank() const override { return group_.number(rank_); }
  void enter(const CallRecord& call) override;
  void leave() noexcept override;
  Board* board() override { return &board_; }

  bool try_send(int peer, const void* data, std::size_t bytes) override;
  Piece try_receive(int peer, std::size_t remaining) override;
  void release(int peer) override;
  std::uint64_t moved() const override { return moved_; }
  void progress() override;
  // Copied into the ring is as good as read; an array that is lent is not.
  bool flushed() override;
  bool flushed_to(int peer) override {
    return !pending_[static_cast<std::size_t>(peer)].active && has_read(peer);
  }

  void check() override { group_.check(); }
  CallRecord call() const override { return call_; }
  void fail(const Failure& failure) noexcept override { group_.fail(failure); }

  SpinLimit spin_limit() override { return memory_spin_limit(group_.in_crowd()); }
  void announce_sleep() override { seen_ = state().queue.announce_sleep(); }
  bool sleep(Clock::duration limit) override {
    return has_failed() || state().queue.sleep(seen_, limit);
  }
  void end_sleep() override { state().queue.end_sleep(); }
  bool has_failed() override { return group_.has_failed(); }
  // Fails the group where a peer is in a call that does not belong to this rank's, or has left.
  void check_peers() override;

  // Returns true if the calls of a peer and of this rank differ, as far as both have come.
  bool differs(int peer) const;
  Failure mismatch_with(int peer) const;
  // Fail the group, and throw that: because of a call that differs; because a peer says that it has
  // an array where it has none.
  [[noreturn]] void mismatch(int peer);
  [[noreturn]] void lose(int peer);

 private:
  friend class ShmBoard;
  // A message, or the rest of one, that is still to be copied into the channel.
  struct Pending {
    const std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::uint64_t place = 0;  // where the peer reaches it, if it does
    bool active = false;
  };

  Group& group() override { return group_; }
  ShmRank& state() const { return memory_.rank(rank_); }
  void wake(int peer) {
    if (memory_.rank(peer).queue.wake_if_asleep()) group_.end_poll(peer);
  }
  // Returns true when a peer has read all that it was lent.
  bool has_read(int peer) const;
  // Fills the free slots. Returns true when nothing is left to send to this peer.
  bool push(int peer);
  // Waits after a failure until no peer writes to this rank's memory any more.
  void withdraw() noexcept;

  ShmGroup& group_;
  const ShmMemory& memory_;
  const int rank_;
  CallRecord call_;
  std::uint64_t fingerprint_ = 0;
  std::uint64_t moved_ = 0;  // parts, of messages that came or went
  std::uint32_t seen_ = 0;   // wake-ups before the sleep
  std::vector<Pending> pending_;
  int unsent_ = 0;  // peers with something pending
  // Parts of each channel that must be taken before all is read that was lent to the peer; whether
  // something was lent that may not have been read.
  std::vector<std::uint64_t> lent_until_;
  bool lends_ = false;
  ShmBoard board_;
};

}  // namespace pycollective
