// Every size and count that was chosen by measuring, in one place. The measurements are in
// benchmarks/results/tuning.md.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace pycollective {

inline constexpr std::size_t kCacheLine = 64;

// Most bytes of a chunk that move at once. A peer reads small segments out of the second-level
// cache of the core that wrote them, which is slower than memory.
inline constexpr std::size_t kSegmentBytes = 4096 * 1024;

// A rank looks at its deadline, at the user's interrupt and at the group's failure between pieces
// of so many bytes.
inline constexpr std::size_t kPieceBytes = std::size_t{8} << 20;

// What several sources are combined through at once: small enough that the result so far, and what
// halves are widened to, stay in the first-level cache.
inline constexpr std::size_t kReduceBlockBytes = 8 * 1024;

// From this size on, a call for all ranks from one thread starts a thread for each rank.
inline constexpr std::size_t kTogetherThreadsFrom = std::size_t{1} << 20;

// Messages that a channel between threads holds; with two, it fills one cache line.
inline constexpr int kChannelSlots = 2;

// Between processes: slots of a channel, most bytes of a slot, and of the slots of all pairs of
// ranks; up to which size a message travels in the slot's own cache lines.
inline constexpr int kShmSlots = 4;
inline constexpr std::size_t kShmSlotBytes = 256 * 1024;
inline constexpr std::size_t kShmRingsBytes = std::size_t{512} << 20;
inline constexpr std::size_t kShmInlineBytes = 224;

// Between processes, a message of at least this many bytes that all ranks of the host can reach is
// not copied into the slots, although its sender then waits for its reader.
inline constexpr std::size_t kShmLentBytes = 128 * 1024;

// A rank's arena: its address space unless PYCOLLECTIVE_ARENA says otherwise, the pages of freed
// memory that it keeps, and from which size on pages are made at once.
inline constexpr std::size_t kArenaBytes = std::size_t{64} << 30;
inline constexpr std::size_t kKeptBytes = std::size_t{512} << 20;
inline constexpr std::size_t kPopulatedFrom = 128 * 1024;
// The least bytes of an array of NumPy's that lies in the arena, under shared_arrays().
inline constexpr std::size_t kSharedFrom = 16 * 1024;

// Between ranks of one host, what messages can have under way before their sender waits: of all
// pairs together, and of one pair. Only what is used is ever there. A ring that fits into the
// second-level cache keeps dirty lines going to and fro between cores.
inline constexpr std::size_t kPipesBytes = std::size_t{256} << 20;
inline constexpr std::size_t kLeastPipeBytes = 32 * 1024;
inline constexpr std::size_t kMostPipeBytes = std::size_t{2} << 20;
// A message of at most this many bytes is announced when all of it is in the ring. Both ranks copy
// the blocks of a longer one at the same time.
inline constexpr std::size_t kWholeBytes = 4 * 1024;
inline constexpr std::size_t pipe_block_bytes(std::size_t message) {
  return std::clamp<std::size_t>(message / 16, 16 * 1024, 128 * 1024);
}
// From this size on, ranks read the array of a scatter's root through the system, if it is
// ordinary.
inline constexpr std::size_t kLentArrayBytes = std::size_t{8} << 20;
// A longer message is copied in and copied out even if the receiver reaches its memory: two cores
// copy at the same time then.
inline constexpr std::size_t kMostLentMessageBytes = std::size_t{8} << 20;
// Over TCP, the polls of a rank that waits for a message before it yields, each a system call.
inline constexpr int kPipeSpins = 30;

// While the program's own threads make asynchronous calls and move messages, the threads for those
// check at this interval whether they still do. With more ranks than cores they let the program's
// threads, which wait for a core, come first. They sleep when nothing was begun for kLinger.
inline constexpr auto kStandBy = std::chrono::microseconds(200);
inline constexpr auto kCrowdedStandBy = std::chrono::milliseconds(5);
inline constexpr std::chrono::microseconds stand_by(bool crowd) {
  return crowd ? kCrowdedStandBy : kStandBy;
}
inline constexpr auto kLinger = std::chrono::milliseconds(20);

// Bytes of messages from one peer that are kept for calls of recv still to come, before no more are
// read.
inline constexpr std::size_t kKeptMessageBytes = std::size_t{64} << 20;

// Over TCP: bytes of a part, and the polls of a waiting rank before it yields, each a system call.
inline constexpr std::size_t kTcpPartBytes = 256 * 1024;
inline constexpr int kTcpSpins = 100;

// Over TCP: a part of so many bytes is read straight to where it belongs; must be more than what
// the first read of a frame asks for.
inline constexpr std::size_t kTcpDirectBytes = 16 * 1024;

// A rank's slots on the board. It can be one call fewer ahead of ranks that it need not wait for: a
// root that sends short arrays is not held up by ranks that have no core. CallHistory keeps more.
inline constexpr std::uint64_t kBoardSlots = 8;

// The direct path of an all-reduce (executor/direct.h). Up to which size of an array, and of all
// ranks' arrays together, everyone combines everything itself.
inline constexpr std::size_t kOneShotBytes = 16 * 1024;
inline constexpr std::size_t kOneShotTotalBytes = 64 * 1024;

// Between devices that reach each other, up to which size of an array every device combines all of
// them for itself. Never measured on a GPU.
inline constexpr std::size_t kDeviceOneShotBytes = 256 * 1024;

// A call of at most this many bytes keeps the GIL while it polls so often for its peers:
// letting it go and getting it back takes as long as the call.
inline constexpr std::size_t kHeldBytes = 64 * 1024;
inline constexpr int kHeldSpins = 200;

// A thread that wants the interpreter lock back spins and yields so often before it asks Python,
// which puts it to sleep. After polls without success it yields a quarter as often the next time.
inline constexpr int kLockSpins = 1000;
inline constexpr int kLockYields = 1000;
inline constexpr int kLeastLockYields = 10;
inline constexpr auto kLockWasFree = std::chrono::microseconds(5);

// A thread of a kernel's team spins and yields so often, about 1 ms, before it sleeps.
inline constexpr int kTeamSpins = 2000;
inline constexpr int kTeamYields = 2000;

// The last-level cache where the system does not say. What a call writes goes past the caches from
// this size of all its arrays on.
inline constexpr std::size_t kUsualCacheBytes = std::size_t{32} << 20;

// Staging of a rank, and the chunks that pass through it: larger than the second-level cache, and
// within the third.
inline constexpr std::size_t kInputStagingBytes = std::size_t{2} << 20;
inline constexpr std::size_t kOutputStagingBytes = std::size_t{2} << 20;
inline constexpr std::size_t kStagedChunkBytes = 128 * 1024;
// The same where ranks reach all memory of their peers, as threads do.
inline constexpr std::size_t kMappedChunkBytes = std::size_t{4} << 20;

// Up to which size the memory of a group's direct path is put into page tables at its start.
inline constexpr std::size_t kPopulatedBytes = std::size_t{64} << 20;

// Blocks that a rank stages ahead; more with more ranks than cores.
inline constexpr int kLookahead = 2;
inline constexpr int kCrowdedLookahead = 6;

// A waiting rank spins and yields so often before it sleeps. In a crowd, with more ranks than
// cores, spinning keeps the others from working. Elsewhere ranks of one host yield for about 1 ms.
inline constexpr int kSpins = 300;
inline constexpr int kCrowdedSpins = 3;
inline constexpr int kYields = 200;
inline constexpr int kHostYields = 2000;

// How long a rank that leaves a failed call waits for a peer to end its piece of work in this
// rank's memory.
inline constexpr auto kWithdrawal = std::chrono::milliseconds(200);

// Address space that is kept until an error has to be told to the other ranks.
inline constexpr std::size_t kReserveBytes = 1 << 20;

// How long a rank whose connection for messages has ended waits to hear why. The reason comes over
// another connection.
inline constexpr auto kEndedPipe = std::chrono::milliseconds(500);

// How often a waiting rank looks at its deadline and at the user's interrupt.
inline constexpr auto kWaitSlice = std::chrono::milliseconds(50);
// How often a rank that waits says so, and the seconds without a word after which a rank is named
// as the one that holds up the others.
inline constexpr auto kBeat = std::chrono::seconds(1);
inline constexpr double kSilence = 2.5;

}  // namespace pycollective
