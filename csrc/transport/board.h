// The board: shared memory in which the ranks of one host carry out collectives without messages.
// The direct path (executor/direct.h) implements the collectives on it. Each rank has one region,
// which it writes and all ranks read:
//
//     slots (kBoardSlots) | counters | input staging ring | output staging ring
//
// * Slots. A rank posts one slot for each call. A slot has the call's sequence number and
//   fingerprint, and either the data of a very short array or handles of its arrays. All ranks make
//   the same calls in the same order, so call n uses slot n % kBoardSlots everywhere. A rank reuses
//   the slot of call n - kBoardSlots when every peer has posted the call after that one. Such a
//   peer has read all slots of call n - kBoardSlots.
// * Counters. Positions in the staging rings, which only grow. They synchronize the blocks of a
//   call. A rank may read a block when its writer's `staged` or `published` has reached the end of
//   the block. It may overwrite a block when the readers' `consumed` or `copied_out` has. With more
//   ranks than cores, any rank may claim the chunk that rank r would combine in a short all-reduce.
//   It then writes rank r's output staging and `published`.
// * Staging. Bounce buffers for arrays that the peers cannot map. All ranks compute the same
//   positions from the call's arguments, so no rank sends an address.
//
// Arrays in an arena (arena.h) are not staged: the peers map them, and read and write them in
// place. tests/core/board_model checks this protocol in every interleaving of two and three ranks.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "schedule/collective.h"
#include "support/copy.h"
#include "support/tuning.h"
#include "support/wait_queue.h"
#include "support/waiter.h"
#include "transport/store_trials.h"

namespace pycollective {

class Board {
 public:
  // A rank's arrays of a call.
  struct Operands {
    std::uint64_t input, output;                // handle_of() each
    std::uint64_t remote_input, remote_output;  // addresses for read_remote(); 0: not offered
    std::uint64_t part;  // bytes of each part in a call whose parts may differ, or kDifferentParts
    std::uint8_t input_shift, output_shift;  // address modulo kCacheLine; staged copies keep it
    std::uint16_t shares;                    // 1: any rank may combine this rank's chunk
    std::uint32_t began;                     // short_time() of the rank's arrival
  };
  static constexpr std::uint64_t kDifferentParts = ~std::uint64_t{0};

  struct alignas(kCacheLine) Slot {
    std::atomic<std::uint64_t> sequence;  // written last
    std::uint64_t fingerprint;
    union {
      Operands operands;
      std::byte data[48];  // the array itself, if it is this short
    };
  };

  // A rank's positions. In the input staging rings: it has staged data for its peers, and consumed
  // its peers' data. In the output staging rings: it has published results, and copied out its
  // peers' results.
  struct alignas(kCacheLine) Counters {
    std::atomic<std::uint64_t> staged, consumed, published, copied_out;
    // The last claim of this rank's chunk: the position of the block, and the rank that combines
    // it.
    std::atomic<std::uint64_t> claim;
    std::atomic<std::uint32_t> accesses_peers;  // 1 while it reads or writes memory of its peers
  };

  // `memory` is zero at first and has bytes_for(...) bytes. Rank r sleeps in queues[r].
  Board(std::byte* memory, int rank, std::vector<WaitQueue*> queues, bool with_staging);
  virtual ~Board() = default;
  static std::size_t bytes_for(int size, bool with_staging);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(queues_.size()); }
  Slot& slot(int rank, std::uint64_t sequence) const {
    return *reinterpret_cast<Slot*>(at(rank) + sequence % kBoardSlots * sizeof(Slot));
  }
  Counters& counters(int rank) const {
    return *reinterpret_cast<Counters*>(at(rank) + sizeof(Slot) * kBoardSlots);
  }
  std::byte* input_staging(int rank) const { return at(rank) + kStagingAt; }
  std::byte* output_staging(int rank) const { return input_staging(rank) + input_bytes_; }
  std::size_t input_bytes() const { return input_bytes_; }
  std::size_t output_bytes() const { return output_bytes_; }
  bool has_staging() const { return has_staging_; }

  // Returns true if this rank may post call `next`: no peer reads the old data of that slot. Fails
  // the group if a peer's call before `next` differs from this rank's.
  bool is_slot_free(std::uint64_t next);
  // Returns true if this peer no longer reads that slot: it has posted call
  // next + 1 - kBoardSlots, or a later one.
  bool has_released(int peer, std::uint64_t next) const {
    return slot(peer, next + 1).sequence.load(std::memory_order_acquire) + kBoardSlots > next;
  }

  void wake_others() const {
    bool interrupt = std::all_of(queues_.begin(), queues_.end(), [](const WaitQueue* queue) {
      return queue->interrupts.load(std::memory_order_relaxed) != 0;
    });
    light_barrier(interrupt);  // as in WaitQueue::wake_if_asleep
    for (WaitQueue* queue : queues_) {
      if (queue != own_queue_ && queue->sleepers.load(std::memory_order_relaxed)) queue->wake();
    }
  }

  // Returns a handle with which the peers map this array; 0 if they cannot.
  virtual std::uint64_t handle_of(const void* data, std::size_t bytes) const = 0;
  // Maps a peer's array by its handle. Returns nullptr if the peer has no such memory.
  virtual std::byte* address_of(int peer, std::uint64_t handle, std::size_t bytes) = 0;
  // Begins a call whose arrays are not in the slots, of `bytes` for an array or a part. Returns the
  // way of this rank's ordinary arrays to the peers, at most `last` (`plain` if it has none).
  virtual CopyWay begin_long_call(Collective, std::size_t /*bytes*/, CopyWay /*last*/) {
    return CopyWay::plain;
  }
  virtual void end_long_call() {}
  // The same for a message of an ordinary array (ring_pipes.h): its sender begins it, its receiver
  // ends it.
  virtual CopyWay begin_long_message(int /*to*/, std::size_t /*bytes*/) { return CopyWay::plain; }
  virtual void end_long_message(std::size_t /*bytes*/, CopyWay, Clock::time_point /*began*/) {}
  Clock::time_point began;  // when the last of the awaited ranks came to the present long call
  StoreTrials stores;
  // Returns the address of an ordinary array for read_remote(). Returns 0 if there is no array, or
  // if the system cannot read it, such as a device's memory.
  virtual std::uint64_t remote_address(const void* /*data*/) { return 0; }
  // Reads a peer's ordinary array. Returns false if the peer has no such memory.
  virtual bool read_remote(int /*peer*/, std::uint64_t /*address*/, std::byte* /*to*/,
                           std::size_t /*bytes*/) {
    return false;
  }
  // Returns private memory for a chunk of a peer's array.
  std::byte* copy_of(int peer, std::size_t stride) {
    copies_.resize(std::max(copies_.size(), stride * peers.size()));
    return copies_.data() + stride * static_cast<std::size_t>(peer);
  }
  // This rank's array that the peers write to in the present call. Empty if they write to none.
  struct Written {
    const std::byte* data = nullptr;
    std::size_t bytes = 0;
  } written;
  // Returns true while a peer reads or writes memory of its peers.
  bool is_any_peer_accessing() const {
    for (int r = 0; r < size(); ++r) {
      if (r != rank_ && counters(r).accesses_peers.load() != 0) return true;
    }
    return false;
  }

  // The number of blocks that a rank stages ahead of its peers.
  int lookahead() const { return is_oversubscribed() ? kOversubscribedLookahead : kLookahead; }
  // Returns true if the host has more ranks than cores.
  virtual bool is_oversubscribed() const = 0;

  // The ranks' arrays in the present call.
  struct Peer {
    std::byte *input = nullptr, *output = nullptr;  // mapped arrays
    std::uint64_t remote_input = 0, remote_output = 0;
  };
  std::vector<Peer> peers;
  // Scratch for combine_all(): an address for each rank, and one more target.
  std::vector<const void*> sources;
  std::vector<void*> targets;

  // Fails the group because a peer's call differs from this rank's.
  [[noreturn]] virtual void mismatch(int peer) = 0;
  // Fails the group because this rank cannot read a peer's array of the present call.
  [[noreturn]] virtual void cannot_read(int peer) = 0;

  std::uint64_t fingerprint = 0;  // of the present call

  // The last call that this rank has posted: its sequence number and fingerprint, and the ends of
  // its data in the staging rings. These positions are the same on all ranks.
  std::uint64_t sequence = 0;
  std::uint64_t posted_fingerprint = 0;
  std::uint64_t input_position = 0, output_position = 0;
  // The last call that all peers are known to have posted, and the position up to which all peers
  // are known to have consumed.
  std::uint64_t all_posted = 0;
  std::uint64_t seen_consumed = 0;

 private:
  static constexpr std::size_t kStagingAt = 4096;
  static_assert(sizeof(Slot) * kBoardSlots + sizeof(Counters) <= kStagingAt);
  static std::size_t bytes_for_rank(int size, bool with_staging);
  std::byte* at(int rank) const { return memory_ + static_cast<std::size_t>(rank) * stride_; }

  std::byte* memory_;
  std::size_t stride_, input_bytes_, output_bytes_;
  bool has_staging_;
  int rank_;
  std::vector<WaitQueue*> queues_;
  WaitQueue* own_queue_;
  std::vector<std::byte> copies_;
};

}  // namespace pycollective
