// Every size and count that was chosen by measuring, in one place.
#pragma once

#include <chrono>
#include <cstddef>

namespace pycollective {

inline constexpr std::size_t kCacheLine = 64;

// Most bytes of a chunk that move at once. Small segments stay in the second-level cache of the
// core that wrote them, and the peer that reads them there waits longer than for memory: at 16 MiB
// among two threads, 128 KiB took 1.4 times as long as one segment.
inline constexpr std::size_t kSegmentBytes = 4096 * 1024;

// A rank looks at its deadline, at the user's interrupt and at the group's failure between pieces
// of so many bytes.
inline constexpr std::size_t kPieceBytes = std::size_t{8} << 20;

// What several sources are combined through at once: small enough that the result so far, and what
// halves are widened to, stay in the first-level cache.
inline constexpr std::size_t kReduceBlockBytes = 8 * 1024;

// From this size on, a call for all ranks from one thread starts a thread for each rank: starting
// them costs about 50 µs.
inline constexpr std::size_t kTogetherThreadsFrom = std::size_t{1} << 20;

// Messages that a channel between threads holds; with two, it fills one cache line.
inline constexpr int kChannelSlots = 2;

// Between processes: slots of a channel, bytes of a slot, and up to which size a message travels in
// the slot's own cache lines.
inline constexpr int kShmSlots = 4;
inline constexpr std::size_t kShmSlotBytes = 256 * 1024;
inline constexpr std::size_t kShmInlineBytes = 224;

// Between processes, from so many bytes on a message that all ranks of the host can reach is not
// copied into the slots: its sender waits for its reader, which a shorter copy does not take. In
// µs, ordinary memory and the heap's, a ring of 2 (of messages of half the size) and the
// hierarchical algorithm among 2 x 2 on two busy cores:
//
//   bytes        16 Ki        64 Ki       256 Ki          1 Mi           4 Mi
//   ring      11    11     15    20     41    40     163   133     3090   938
//   2 x 2    179   153    223   213    576   292    4944  4046    27461 18701
inline constexpr std::size_t kShmLentBytes = 128 * 1024;

// A rank's arena: its address space unless PYCOLLECTIVE_ARENA says otherwise, the pages of freed
// memory that it keeps, and from which size on pages are made at once.
inline constexpr std::size_t kArenaBytes = std::size_t{64} << 30;
inline constexpr std::size_t kKeptBytes = std::size_t{512} << 20;
inline constexpr std::size_t kPopulatedFrom = 128 * 1024;
// The least bytes of an array of NumPy's that lies in the arena, under shared_arrays().
inline constexpr std::size_t kSharedFrom = 16 * 1024;

// What a message between two ranks of one host can have under way before its sender waits: of all
// pairs together, and of one pair. Only what is used is ever there.
inline constexpr std::size_t kPipesBytes = std::size_t{64} << 20;
inline constexpr std::size_t kLeastPipeBytes = 4 * 1024;
inline constexpr std::size_t kMostPipeBytes = 256 * 1024;

// Bytes of messages from one peer that are kept for calls of recv still to come, before no more are
// read.
inline constexpr std::size_t kKeptMessageBytes = std::size_t{64} << 20;

// Over TCP: bytes of a part (64 KiB took 1.6 times as long at 64 MiB between two processes, 1 MiB
// as long), and how often a waiting rank looks before it yields and sleeps; a look is a system
// call.
inline constexpr std::size_t kTcpPartBytes = 256 * 1024;
inline constexpr int kTcpSpins = 100;

// Over TCP: a part of so many bytes is read straight to where it belongs; must be more than what
// the first read of a frame asks for.
inline constexpr std::size_t kTcpDirectBytes = 16 * 1024;

// A rank that waits for shared memory and for connections at once looks at these so often: nothing
// wakes it for both.
inline constexpr auto kMixedSlice = std::chrono::microseconds(200);

// The direct path of an all-reduce (executor/direct.h). Up to which size of an array, and of all
// ranks' arrays together, everyone combines everything itself.
inline constexpr std::size_t kOneShotBytes = 16 * 1024;
inline constexpr std::size_t kOneShotTotalBytes = 64 * 1024;

// Between devices that reach each other, up to which size of an array every device combines all of
// them for itself. Never measured on a GPU.
inline constexpr std::size_t kDeviceOneShotBytes = 256 * 1024;

// While a call of so many bytes looks so often for its peers, it keeps Python's interpreter lock:
// letting it go and getting it back takes as long as the call.
inline constexpr std::size_t kHeldBytes = 64 * 1024;
inline constexpr int kHeldLooks = 200;

// A thread that wants the interpreter lock back looks so often whether another one lets go of it,
// and yields so often, before Python puts it to sleep: 8 bytes between two threads then take 3 µs
// instead of 57, and steps of two replicas that are mostly Python between short kernels 0.8 times
// as long as with 10 yields. Where that was in vain, because Python's own threads had let go of the
// lock without a word, the next time has a quarter of the yields.
inline constexpr int kLockSpins = 1000;
inline constexpr int kLockYields = 1000;
inline constexpr int kLeastLockYields = 10;
inline constexpr auto kLockWasFree = std::chrono::microseconds(5);

// A thread of a kernel's team looks so often for the next kernel, and who called it for the end of
// the others' parts, then yields so often to whoever wants the core, before it sleeps: about 1 ms,
// in which a step of training goes from one kernel to the next. Waking a thread of a virtual
// machine takes tens of µs: without the yields, which were 100 µs of looking, the kernels of the
// tutorial's step took 1.2 times as long.
inline constexpr int kTeamSpins = 2000;
inline constexpr int kTeamYields = 2000;

// Staging of a rank, and the chunks that pass through it. A ring that fits into the second-level
// cache keeps dirty lines going to and fro between cores; one beyond the third level is slow too.
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

// A waiting rank looks this often before it yields, and yields this often before it sleeps. With
// more ranks than cores, spinning only keeps the others from working. Ranks of one host that have
// cores of their own yield for about 1 ms, like threads of a kernel's team: replicas of a step come
// to its collectives some 100 µs apart, and to wake one takes as long.
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
