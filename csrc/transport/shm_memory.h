// The layout of a process group's shared memory, in this order:
// 1. A header.
// 2. The state of each rank.
// 3. A channel and its ring for each ordered pair of ranks.
// 4. The board (board.h).
// 5. The pipes for point-to-point messages (ring_pipes.h).
// 6. The arena of each rank (arena.h).
//
// New memory is zero, a valid initial state of every part.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "schedule/collective.h"
#include "support/copy.h"
#include "support/cores.h"
#include "support/peer_memory.h"
#include "support/shared_memory.h"
#include "support/tuning.h"
#include "support/wait_queue.h"
#include "transport/failure_record.h"
#include "transport/shared_history.h"

namespace pycollective {

// Each collective has a way of copying for each class of sizes (powers of two). Messages are the
// last kind.
inline constexpr int kMessageCopies = kDirectCollectives, kCopyKinds = kMessageCopies + 1;

struct ShmHeader {
  std::uint64_t magic;
  std::uint32_t version;
  std::int32_t size;
  std::uint64_t bytes;
  std::uint64_t arena;                                           // bytes of each rank's arena
  std::atomic<std::uint64_t> cores[std::tuple_size_v<CoreSet>];  // of all joined ranks
  std::atomic<std::uint32_t> failed;                             // 0: no, 1: being written, 2: yes
  FailureRecord reason;
  // The calls at which the ranks try the ways of copying anew.
  std::atomic<std::uint64_t> copy_retries[kCopyKinds][kCopySizes];
};

// `ended`: the launcher reports that the process ended without an error and did not leave.
enum class Presence : std::uint32_t { absent, joined, left, ended };

// A rank's shortest times, in µs, of long calls, and of long messages that it has received. 0: none
// yet.
using CopyTimes = std::atomic<float>[kCopyKinds][kCopySizes][kCopyWays];

struct alignas(kCacheLine) ShmRank {
  WaitQueue queue;
  alignas(kCacheLine) std::atomic<Presence> presence;
  std::atomic<std::uint32_t> busy;  // 1 in a collective call
  std::atomic<std::uint64_t> heartbeats;
  // Index of its arena + 1; 0: not known yet; -1: the rank could not map the arenas.
  std::atomic<std::int32_t> arena;
  std::atomic<std::int32_t>
      number_in_followed;  // its rank in the followed group + 1; 0: not known yet
  PeerMemory memory;       // written before `arena`
  // 1: it can read the ordinary memory of all ranks; -1: it cannot; 0: not known yet.
  std::atomic<std::int32_t> reads;
  CopyTimes copy_times;
  char message[160];  // the point-to-point message in which it waits, for texts
  SharedHistory history;
};

// A queue for messages of collective calls from one rank to another. Long messages have several
// parts.
struct alignas(kCacheLine) ShmChannel {
  struct alignas(kCacheLine) Slot {
    std::uint64_t fingerprint;
    std::uint64_t call;       // its number
    std::uint64_t remaining;  // bytes of the message, this part's and those to come
    std::uint64_t bytes;      // of this part
    union {
      std::byte inline_data[kShmInlineBytes];
      std::uint64_t
          handle;  // of longer parts: 0 if it is in the ring, else its handle in the arena
    };
  };
  // A sender may be kShmSlots messages ahead.
  static_assert(SharedHistory::kLength >= kShmSlots + 2);

  // Parts that were ever posted, and consumed.
  std::atomic<std::uint64_t> posted;
  alignas(kCacheLine) std::atomic<std::uint64_t> consumed;
  Slot slots[kShmSlots];
};

class ShmMemory {
 public:
  // Creates memory for `size` ranks with arenas of `arena` bytes of address space; without arenas
  // if the system allows no file of that length.
  static ShmMemory create(int size, std::size_t arena);
  // Maps the memory of a descriptor. Throws std::invalid_argument if it has no group.
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
  // Allocates the pages of the board, up to kPopulatedBytes. Otherwise the first calls would.
  void populate_board() const;

 private:
  // The offsets of the parts.
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
