// A board: memory that all ranks of a group on one host reach, where they post what they bring to a
// call. It is what the direct path (executor/direct.h) works on.
//
// Every rank has on it kBoardSlots slots in turn, counters that only grow, and rings of staging
// memory. A slot is posted anew when all ranks have posted the turn after its last one: then nobody
// reads it any more. All ranks make the same calls, so that each knows where in its staging the
// others will look without being told.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/tuning.h"
#include "support/wait_queue.h"

namespace pycollective {

class Board {
 public:
  // Where a rank's arrays are.
  struct Places {
    std::uint64_t input, output;              // as place_of() gave it; 0: peers cannot reach it
    std::uint32_t input_shift, output_shift;  // address modulo a cache line, which staging keeps
    std::uint64_t lent;                       // the input, as lend() gave it; 0: it is not lent
  };

  // A rank's entry into a call.
  struct alignas(kCacheLine) Slot {
    std::atomic<std::uint64_t> turn;  // written last
    std::uint64_t fingerprint;
    union {
      Places places;
      std::byte data[48];  // an array that is this short
    };
  };

  // How far a rank is: in the staging of exchanges it has staged for others, and consumed what
  // others have staged for it; in the staging of results it has published, and taken what others
  // have published.
  struct alignas(kCacheLine) Counters {
    std::atomic<std::uint64_t> staged, consumed, published, taken;
    std::atomic<std::uint32_t> reaching;  // it reads or writes memory of its peers now
  };

  // `memory`, all zero at first, has bytes_for(...) bytes; queues[r] is where rank r sleeps.
  Board(std::byte* memory, int rank, std::vector<WaitQueue*> queues, bool with_staging);
  virtual ~Board() = default;
  static std::size_t bytes_for(int size, bool with_staging);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(queues_.size()); }
  Slot& slot(int rank, std::uint64_t turn) const {
    return *reinterpret_cast<Slot*>(at(rank) + turn % kBoardSlots * sizeof(Slot));
  }
  Counters& counters(int rank) const {
    return *reinterpret_cast<Counters*>(at(rank) + sizeof(Slot) * kBoardSlots);
  }
  std::byte* input_staging(int rank) const { return at(rank) + kStagingAt; }
  std::byte* output_staging(int rank) const { return input_staging(rank) + input_bytes_; }
  std::size_t input_bytes() const { return input_bytes_; }
  bool has_staging() const { return has_staging_; }

  // Returns true when no peer reads any more what this rank's slot for its next turn holds. Fails
  // the group if a peer has posted another call in the last turn.
  bool is_free(std::uint64_t next);
  // Returns true when this peer does not read it any more: it has posted turn
  // next + 1 - kBoardSlots, or a later one in the same slot.
  bool has_read(int peer, std::uint64_t next) const {
    return slot(peer, next + 1).turn.load(std::memory_order_acquire) + kBoardSlots > next;
  }

  // Wakes the peers that sleep.
  void wake_others() const {
    bool interrupt = std::all_of(queues_.begin(), queues_.end(), [](const WaitQueue* queue) {
      return queue->interrupts.load(std::memory_order_relaxed) != 0;
    });
    light_barrier(interrupt);  // as in WaitQueue::wake_if_asleep
    for (WaitQueue* queue : queues_) {
      if (queue != own_queue_ && queue->sleepers.load(std::memory_order_relaxed)) queue->wake();
    }
  }

  // How peers name a rank's array, 0 if they cannot reach it; and what another rank's name means,
  // which fails the group if there is no such memory.
  virtual std::uint64_t place_of(const void* data, std::size_t bytes) const = 0;
  virtual std::byte* reach(int peer, std::uint64_t place, std::size_t bytes) = 0;
  // Returns the name of a rank's array that peers do not reach, but read through the system; 0 if
  // they cannot, or should not. All ranks of a call ask, those that lend nothing with nullptr: each
  // finds out whether it can read.
  virtual std::uint64_t lend(const void* /*data*/, std::size_t /*bytes*/) { return 0; }
  // Reads what a peer has lent. Fails the group if there is no such memory.
  virtual void read(int /*peer*/, std::uint64_t /*lent*/, std::byte* /*to*/,
                    std::size_t /*bytes*/) {}
  // This rank's own array of the present call that peers write to, if they do.
  struct Written {
    const std::byte* data = nullptr;
    std::size_t bytes = 0;
  } written;
  // Whether a peer reads or writes memory of its peers now.
  bool is_reached() const {
    for (int r = 0; r < size(); ++r) {
      if (r != rank_ && counters(r).reaching.load() != 0) return true;
    }
    return false;
  }

  // How many blocks a rank goes ahead of its peers: far, where they do not all run at once.
  int lookahead() const { return in_crowd() ? kCrowdedLookahead : kLookahead; }
  // Whether there are more ranks than cores for them.
  virtual bool in_crowd() const = 0;

  // Of the present call: where this rank reaches the ranks' arrays; nullptr where it does not.
  struct Peer {
    std::byte *input = nullptr, *output = nullptr;
    std::uint64_t lent = 0;  // the input, which this rank reads through the system
  };
  std::vector<Peer> peers;
  // Room for addresses of all ranks, and of one more.
  std::vector<const void*> sources;
  std::vector<void*> targets;

  // Fails the group because a peer has posted a call that does not belong to this rank's.
  [[noreturn]] virtual void mismatch(int peer) = 0;

  std::uint64_t fingerprint = 0;  // of the call that this rank is in

  // Of this rank, and the same on all: calls posted so far, and where the next ones' staging
  // begins.
  std::uint64_t turn = 0;
  std::uint64_t input_position = 0, output_position = 0;
  std::uint64_t posted = 0;         // fingerprint of the last call
  std::uint64_t settled = 0;        // the last turn that all peers are known to have posted
  std::uint64_t seen_consumed = 0;  // position that all peers are known to have consumed

 private:
  static constexpr std::size_t kStagingAt = 4096;
  static_assert(sizeof(Slot) * kBoardSlots + sizeof(Counters) <= kStagingAt);
  std::byte* at(int rank) const { return memory_ + static_cast<std::size_t>(rank) * stride_; }

  std::byte* memory_;
  std::size_t stride_, input_bytes_;
  bool has_staging_;
  int rank_;
  std::vector<WaitQueue*> queues_;
  WaitQueue* own_queue_;
};

}  // namespace pycollective
