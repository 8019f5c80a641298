// The endpoint of a rank of a process group.
//
// A sender copies its message into the channel's ring, one part for each free slot. The receiver
// reduces or copies directly out of the ring. Small messages are stored in the slot itself. Long
// arrays of the arena are sent without a copy (zero-copy): the receiver reads them in place. A
// waiting rank sleeps on a futex in the shared memory.
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
  std::uint64_t handle_of(const void* data, std::size_t bytes) const override;
  std::byte* address_of(int peer, std::uint64_t handle, std::size_t bytes) override;
  CopyWay begin_long_call(Collective collective, std::size_t bytes, CopyWay last) override;
  void end_long_call() override;
  std::uint64_t remote_address(const void* data) override;
  CopyWay begin_long_message(int to, std::size_t bytes) override;
  void end_long_message(std::size_t bytes, CopyWay way, Clock::time_point began) override;
  bool read_remote(int peer, std::uint64_t address, std::byte* to, std::size_t bytes) override;
  bool is_oversubscribed() const override;
  [[noreturn]] void mismatch(int peer) override;
  [[noreturn]] void cannot_read(int peer) override;

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
  // Data copied into the ring needs no acknowledgement. A zero-copy array does: the peer still
  // reads it.
  bool flushed() override;
  bool flushed_to(int peer) override {
    return !pending_[static_cast<std::size_t>(peer)].active && has_read(peer);
  }

  void check() override { group_.check(); }
  CallRecord call() const override { return call_; }
  void fail(const Failure& failure) noexcept override { group_.fail(failure); }

  SpinLimit spin_limit() override { return memory_spin_limit(group_.is_oversubscribed()); }
  void announce_sleep() override { seen_ = state().queue.announce_sleep(); }
  bool sleep(Clock::duration limit) override {
    return has_failed() || state().queue.sleep(seen_, limit);
  }
  void end_sleep() override { state().queue.end_sleep(); }
  bool has_failed() override { return group_.has_failed(); }
  // Fails the group if a peer's call differs from this rank's, or if a peer has left.
  void check_peers() override;

  // Returns true if a peer's calls are known to differ from this rank's.
  bool differs(int peer) const;
  Failure mismatch_with(int peer) const;
  // Both fail the group and throw: because a peer's call differs, and because this rank cannot read
  // a peer's array of the present call. For the thread that makes the call.
  [[noreturn]] void mismatch(int peer);
  [[noreturn]] void cannot_read(int peer);

 private:
  friend class ShmBoard;
  // A message, or the rest of one, that is not in the channel yet.
  struct Pending {
    const std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::uint64_t handle = 0;  // of a zero-copy message; 0: none
    bool active = false;
  };

  Group& group() override { return group_; }
  ShmRank& state() const { return memory_.rank(rank_); }
  void wake(int peer) {
    if (memory_.rank(peer).queue.wake_if_asleep()) group_.end_poll(peer);
  }
  // Returns true if a peer has read all zero-copy messages.
  bool has_read(int peer) const;
  // Fills free slots. Returns true if nothing is left to send to this peer.
  bool push(int peer);
  // After a failure: waits until no peer writes to this rank's memory.
  void withdraw() noexcept;

  ShmGroup& group_;
  const ShmMemory& memory_;
  const int rank_;
  CallRecord call_;
  std::uint64_t fingerprint_ = 0;
  std::uint64_t moved_ = 0;  // parts sent and received
  std::uint32_t seen_ = 0;   // wake-ups before the sleep
  std::vector<Pending> pending_;
  int unsent_ = 0;  // peers with something pending
  // For each peer, the value of ShmChannel::consumed at which it has read all zero-copy messages;
  // and true if there may be unread ones.
  std::vector<std::uint64_t> zero_copy_until_;
  bool has_zero_copy_ = false;
  ShmBoard board_;
};

}  // namespace pycollective
