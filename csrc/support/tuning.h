// All sizes and counts that were chosen by measurement (benchmarks/results/tuning.md).
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace pycollective {

inline constexpr std::size_t kCacheLine = 64;

// Largest segment of a chunk. Small segments are slower: a peer then reads them from the
// second-level cache of the core that wrote them, which is slower than memory.
inline constexpr std::size_t kSegmentBytes = 4096 * 1024;

// A rank checks its deadline, Ctrl-C and the group's failure after each piece of this size.
inline constexpr std::size_t kPieceBytes = std::size_t{8} << 20;

// Block in which several sources are combined. The partial result, and halves widened to float32,
// stay in the first-level cache.
inline constexpr std::size_t kReduceBlockBytes = 8 * 1024;

// In a call for all ranks from one thread, the threads of kernels share the direct path's work, in
// parts of at least kTogetherPartBytes. Other algorithms start one thread per rank.
inline constexpr std::size_t kTogetherPartBytes = 64 * 1024;
inline constexpr std::size_t kTogetherThreadsFrom = std::size_t{1} << 20;

// Messages in a channel between threads; 2 fill one cache line.
inline constexpr int kChannelSlots = 2;

// Between processes: slots of a channel, largest slot, and limit for the slots of all pairs of
// ranks. A message up to kShmInlineBytes travels in the slot's own cache lines.
inline constexpr int kShmSlots = 4;
inline constexpr std::size_t kShmSlotBytes = 256 * 1024;
inline constexpr std::size_t kShmRingsBytes = std::size_t{512} << 20;
inline constexpr std::size_t kShmInlineBytes = 224;

// Between processes, a message of at least this size is read in place by the receiver if all ranks
// of the host can map it. Its sender has to wait for the reader.
inline constexpr std::size_t kZeroCopyBytes = 32 * 1024;

// The arena of a rank: its address space unless PYCOLLECTIVE_ARENA sets it, and the freed pages
// that it keeps. From kPopulatedFrom on, an allocation gets its pages at once.
inline constexpr std::size_t kArenaBytes = std::size_t{64} << 30;
inline constexpr std::size_t kKeptBytes = std::size_t{512} << 20;
inline constexpr std::size_t kPopulatedFrom = 128 * 1024;
// With shared_arrays(), NumPy arrays of at least this size lie in the arena.
inline constexpr std::size_t kSharedFrom = 16 * 1024;
// Results that a call allocates lie in the arena from this size on; the choice costs 0.3 µs.
inline constexpr std::size_t kSharedResultFrom = 64 * 1024;

// Between ranks of one host, limits for unreceived messages before their sender waits: of all
// pairs, and of one pair. Only used pages are allocated. A ring that fits into the second-level
// cache would be slow, because its modified lines move between the cores.
inline constexpr std::size_t kPipesBytes = std::size_t{256} << 20;
inline constexpr std::size_t kLeastPipeBytes = 32 * 1024;
inline constexpr std::size_t kMostPipeBytes = std::size_t{2} << 20;
// A message up to this size is announced after all of it is in the ring. Longer messages are
// announced block by block, so that both ranks copy at the same time.
inline constexpr std::size_t kWholeBytes = 4 * 1024;
inline constexpr std::size_t pipe_block_bytes(std::size_t message) {
  return std::clamp<std::size_t>(message / 16 / kCacheLine * kCacheLine, 16 * 1024, 128 * 1024);
}
// From this size of an array, a part or a message on, ordinary arrays have three ways to the peers
// (CopyWay). The fastest one depends on the processor, and on the caches that the ranks' cores
// share, which change when the system moves a rank. So the first calls of each kind and size
// (powers of two) try the ways in turn; the first trials of each are not timed. Later calls try
// again, after kCopyPeriodBytes and at least kLeastCopyPeriod calls.
inline constexpr std::size_t kCopyTrialBytes = 4 * 1024;
inline constexpr int kCopySizes = 20;
inline constexpr int kCopyTrials = 6;
inline constexpr int kCopyWarmups = 2;
inline constexpr int kStoreTrials = 3;  // of each way in StoreTrials, with one that is not timed
inline constexpr std::size_t kCopyPeriodBytes = std::size_t{256} << 20, kLeastCopyPeriod = 1024;
// Calls try again sooner if they have become slow. From kCopyRest calls after the trials on, a rank
// times each call in kCopyCheck. A time is slow if it is kSlowCopy times the rank's shortest trial
// of the chosen way. After kSlowCopies slow times in a row, the rank asks all ranks to try again.
inline constexpr int kCopyCheck = 8, kCopyRest = 128, kSlowCopies = 3;
inline constexpr float kSlowCopy = 1.5F;
// A longer message is copied in and copied out even if the receiver reaches its memory: two cores
// copy at the same time then.
inline constexpr std::size_t kMostZeroCopyBytes = std::size_t{8} << 20;
// Over TCP, the polls (system calls) for a message before the waiting rank yields.
inline constexpr int kPipeSpins = 30;

// The threads for asynchronous calls and messages stay passive while the program's own threads do
// their work, and check at this interval. With more ranks than cores the interval is longer,
// because the program's threads need the cores. After kLinger without new work they sleep.
inline constexpr auto kStandBy = std::chrono::microseconds(200);
inline constexpr auto kOversubscribedStandBy = std::chrono::milliseconds(5);
inline constexpr std::chrono::microseconds stand_by(bool oversubscribed) {
  return oversubscribed ? kOversubscribedStandBy : kStandBy;
}
inline constexpr auto kLinger = std::chrono::milliseconds(20);

// Bytes of messages from one peer that are kept until recv asks for them. With more, the transport
// stops reading.
inline constexpr std::size_t kKeptMessageBytes = std::size_t{64} << 20;

// Over TCP, the largest part, and the most bytes of a message for one system call. The last parts
// of a chunk are shorter, so that the receiver combines one while it receives the next one. Parts
// split no item.
inline constexpr std::size_t kTcpPartBytes = 512 * 1024;
inline constexpr std::size_t tcp_part_bytes(std::size_t left) {
  const std::size_t half = left / 2 / 4096 * 4096;
  return std::min(left, std::clamp<std::size_t>(half, 256 * 1024, kTcpPartBytes));
}
// Over TCP, the polls (system calls) of a waiting rank before it yields.
inline constexpr int kTcpSpins = 100;

// Over TCP, a part of at least this size is read directly to its target. It must exceed the size of
// a frame's first read.
inline constexpr std::size_t kTcpDirectBytes = 16 * 1024;

// Board slots of a rank. A rank can be kBoardSlots - 1 calls ahead of ranks on which it does not
// depend. A root that sends short arrays need not wait for ranks without a core. CallHistory must
// keep more calls than this.
inline constexpr std::uint64_t kBoardSlots = 8;

// The largest one-shot calls of the direct path (executor/direct.h): limits for an array, and for
// all ranks' arrays together.
inline constexpr std::size_t kOneShotBytes = 16 * 1024;
inline constexpr std::size_t kOneShotTotalBytes = 64 * 1024;

// The same limit for an array, between devices that reach each other. Never measured on a GPU.
inline constexpr std::size_t kDeviceOneShotBytes = 256 * 1024;

// A call up to this size keeps the GIL for this number of polls: releasing and reacquiring the GIL
// takes as long as the call.
inline constexpr std::size_t kHeldBytes = 64 * 1024;
inline constexpr int kHeldSpins = 200;

// A thread that wants the GIL back spins and yields up to these limits before it asks Python, which
// puts the thread to sleep. If Python then returns the GIL within kLockWasFree, the yields did
// not help: the thread's next limit of yields is a quarter of this one.
inline constexpr int kLockSpins = 1000;
inline constexpr int kLockYields = 1000;
inline constexpr int kLeastLockYields = 10;
inline constexpr auto kLockWasFree = std::chrono::microseconds(5);

// Spins and yields (together about 1 ms) of a thread in a kernel's team before it sleeps.
inline constexpr int kTeamSpins = 2000;
inline constexpr int kTeamYields = 2000;

// The last-level cache's assumed size if the system does not report it (past_cache_from()).
inline constexpr std::size_t kUsualCacheBytes = std::size_t{32} << 20;
// The ranks of a group get at most this much of a larger cache, which has other users.
inline constexpr std::size_t kMostCacheBytes = std::size_t{128} << 20;

// A reduce of more ranks is distributed: rank r combines chunk r of the array. Otherwise the root
// combines everything, while its peers copy their next blocks.
inline constexpr int kCentralReduceRanks = 4;

// The staging rings of a rank, of which it has one for inputs and one for results, and the chunks
// that pass through them. The rings of a few ranks are larger than the second-level cache. Those of
// more ranks are smaller, so that all rings fit into the third-level cache together.
inline constexpr std::size_t kStagingBytes = std::size_t{8} << 20;  // of one kind, of all ranks
inline constexpr std::size_t kLeastStagingBytes = 512 * 1024;
inline constexpr std::size_t kMostStagingBytes = std::size_t{2} << 20;
inline constexpr std::size_t staging_bytes(int ranks) {
  const std::size_t share = kStagingBytes / static_cast<std::size_t>(ranks) / 4096 * 4096;
  return std::clamp(share, kLeastStagingBytes, kMostStagingBytes);
}
inline constexpr std::size_t input_staging_bytes(int ranks) { return staging_bytes(ranks); }
inline constexpr std::size_t output_staging_bytes(int ranks) { return staging_bytes(ranks); }
inline constexpr std::size_t kStagedChunkBytes = 128 * 1024;
// The chunks where ranks reach all memory of their peers, as threads do.
inline constexpr std::size_t kMappedChunkBytes = std::size_t{4} << 20;

// When a group starts, its memory for the direct path is allocated up to this size.
inline constexpr std::size_t kPopulatedBytes = std::size_t{64} << 20;

// From this many bytes of the whole array on, all ranks share the copies of a broadcast or a gather
// of mapped arrays. Below, waiting for each other takes longer.
inline constexpr std::size_t kSharedCopyBytes = 512 << 10;

// Blocks that a rank stages ahead, and the same with more ranks than cores.
inline constexpr int kLookahead = 2;
inline constexpr int kOversubscribedLookahead = 6;

// Spins and yields of a waiting rank before it sleeps. With more ranks than cores, spinning would
// take cores from the other ranks. Otherwise ranks of one host yield for about 1 ms.
inline constexpr int kSpins = 300;
inline constexpr int kOversubscribedSpins = 3;
inline constexpr int kYields = 200;
inline constexpr int kHostYields = 2000;

// A yield of at least this time let another thread run. After kSharedYields of them, or a small
// multiple of it, a rank of a host with a core for each rank moves to another core.
inline constexpr auto kOthersRan = std::chrono::nanoseconds(1500);
inline constexpr int kSharedYields = 5;
inline constexpr auto kCoreMove = std::chrono::milliseconds(10);

// After a failed call, a rank waits this long for a peer that still works in this rank's memory.
inline constexpr auto kWithdrawal = std::chrono::milliseconds(200);

// Address space that is kept free for reporting an error to the other ranks.
inline constexpr std::size_t kReserveBytes = 1 << 20;

// After its connection for messages has ended, a rank waits this long for the reason, which arrives
// over another connection.
inline constexpr auto kEndedPipe = std::chrono::milliseconds(500);

// Interval at which a waiting rank checks its deadline and Ctrl-C.
inline constexpr auto kWaitSlice = std::chrono::milliseconds(50);
// Interval at which a waiting rank sends a heartbeat, and the seconds of silence after which
// waiting ranks name a rank as late.
inline constexpr auto kHeartbeatInterval = std::chrono::seconds(1);
inline constexpr double kSilence = 2.5;

}  // namespace pycollective
