// The memory of a group of processes: what lies in it, and where.
//
// A header, the state of each rank, a channel and its ring for each ordered pair of ranks, the
// board (board.h), the pipes of messages between two ranks (ring_pipes.h), and each rank's arena
// (arena.h). New memory is zero, which is the value that all of it begins with.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "support/cores.h"
#include "support/peer_memory.h"
#include "support/shared_memory.h"
#include "support/tuning.h"
#include "support/wait_queue.h"
#include "transport/failure_record.h"
#include "transport/shared_history.h"

namespace pycollective {

struct ShmHeader {
  std::uint64_t magic;
  std::uint32_t version;
  std::int32_t size;
  std::uint64_t bytes;
  std::uint64_t arena;                                           // bytes of each rank's
  std::atomic<std::uint64_t> cores[std::tuple_size_v<CoreSet>];  // of all ranks that have joined
  std::atomic<std::uint32_t> failed;                             // 0: no, 1: being written, 2: yes
  FailureRecord reason;
};

// Only the launcher says that a process has ended, of one that ends without an error.
enum class Presence : std::uint32_t { absent, joined, left, ended };

struct alignas(kCacheLine) ShmRank {
  WaitQueue queue;
  alignas(kCacheLine) std::atomic<Presence> presence;
  std::atomic<std::uint32_t> busy;  // 1 in a collective call
  std::atomic<std::uint64_t> beats;
  // One more than its place among the arenas; 0: not known yet, -1: the rank has not mapped them.
  std::atomic<std::int32_t> arena;
  std::atomic<std::int32_t> there;  // one more than its number in the followed group; 0: not known
  PeerMemory memory;                // its ordinary memory, written before `arena`
  // Whether it reads the ordinary memory of all ranks: 0: not known yet, -1: it does not, 1: it
  // does.
  std::atomic<std::int32_t> reads;
  char message[160];  // between two ranks, in which it waits; only for texts
  SharedHistory history;
};

// Messages of collective calls from one rank to another, in parts.
struct alignas(kCacheLine) ShmChannel {
  struct alignas(kCacheLine) Slot {
    std::uint64_t fingerprint;
    std::uint64_t call;       // its number
    std::uint64_t remaining;  // bytes of the message, this part's and those to come
    std::uint64_t bytes;      // of this part
    union {
      std::byte inline_data[kShmInlineBytes];
      std::uint64_t place;  // of longer ones: 0 in the ring, else where in the arena it is lent
    };
  };
  // A sender may be as many messages ahead as a channel has slots.
  static_assert(SharedHistory::kLength >= kShmSlots + 2);

  std::atomic<std::uint64_t> posted;  // parts, ever
  alignas(kCacheLine) std::atomic<std::uint64_t> taken;
  Slot slots[kShmSlots];
};

class ShmMemory {
 public:
  // New memory for `size` ranks, each of which has an arena of `arena` bytes of address space; of
  // none, if the system allows no file of that length.
  static ShmMemory create(int size, std::size_t arena);
  // The memory behind a descriptor. Throws std::invalid_argument if no group is in it.
  static ShmMemory open(int descriptor);

  int descriptor() const { return memory_.descriptor(); }
  int size() const { return begin_.size; }
  std::size_t arena_bytes() const { return arena_bytes_; }  // of each rank
  std::uint64_t arenas_begin() const { return begin_.arenas; }

  ShmHeader& header() const { return *reinterpret_cast<ShmHeader*>(at(0)); }
  ShmRank& rank(int rank) const { return reinterpret_cast<ShmRank*>(at(begin_.ranks))[rank]; }
  ShmChannel& channel(int from, int to) const {
    return reinterpret_cast<ShmChannel*>(at(begin_.channels))[pair(from, to)];
  }
  // The ring of a channel: kShmSlots times slot_bytes().
  std::byte* ring(int from, int to) const {
    return at(begin_.rings) + pair(from, to) * kShmSlots * slot_bytes();
  }
  std::size_t slot_bytes() const { return begin_.slot_bytes; }
  std::byte* board() const { return at(begin_.board); }
  std::byte* pipes() const { return at(begin_.pipes); }
  // Has the pages of the board ready, unless they are many: a call that is the first to touch them
  // would be slow.
  void populate_board() const;

 private:
  // The places at which the parts begin.
  struct Layout {
    explicit Layout(int size);
    std::size_t ranks, channels, rings, board, pipes, end, arenas;
    std::uint64_t bytes_with_arenas(std::size_t arena) const;
    int size;
    std::size_t slot_bytes;
  };

  ShmMemory(SharedMemory memory, const Layout& begin, std::size_t arena_bytes);
  std::byte* at(std::size_t place) const { return mapping_.data() + place; }
  std::size_t pair(int from, int to) const {
    return static_cast<std::size_t>(from) * static_cast<std::size_t>(size()) +
           static_cast<std::size_t>(to);
  }

  SharedMemory memory_;
  Layout begin_;
  Mapping mapping_;  // of all but the arenas
  std::size_t arena_bytes_;
};

}  // namespace pycollective
