// The sizes of csrc/support/tuning.h that the direct path uses, so small that a few blocks fill the
// staging. The model (../model.cc) is built with them.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace pycollective {

inline constexpr std::size_t kCacheLine = 64;
inline constexpr std::size_t kPieceBytes = 256;  // four blocks, which a remote read joins
inline constexpr std::size_t kReduceBlockBytes = 64;
inline constexpr std::uint64_t kBoardSlots = 3;
inline constexpr std::size_t kOneShotBytes = 64;
inline constexpr std::size_t kOneShotTotalBytes = 256;
inline int kCentralReduceRanks = 0;  // of the present program
inline constexpr std::size_t input_staging_bytes(int) { return 2304; }
inline constexpr std::size_t output_staging_bytes(int) { return 640; }
inline constexpr std::size_t kStagedChunkBytes = 64;
inline constexpr std::size_t kMappedChunkBytes = 64;
inline constexpr std::size_t kUsualCacheBytes = std::size_t{32} << 20;
inline constexpr std::size_t kMostCacheBytes = std::size_t{128} << 20;
inline constexpr int kStoreTrials = 3;
inline constexpr std::size_t kCopyPeriodBytes = std::size_t{256} << 20, kLeastCopyPeriod = 1024;
inline constexpr std::size_t kSharedCopyBytes = 65;
inline constexpr int kLookahead = 1;
inline constexpr int kOversubscribedLookahead = 3;

// Nothing waits in the model.
inline constexpr int kSpins = 0;
inline constexpr int kOversubscribedSpins = 0;
inline constexpr int kTcpSpins = 0;
inline constexpr int kYields = 0;
inline constexpr int kHostYields = 0;
inline constexpr auto kWaitSlice = std::chrono::milliseconds(50);
inline constexpr auto kOthersRan = std::chrono::nanoseconds(1500);
inline constexpr int kSharedYields = 5;
inline constexpr auto kCoreMove = std::chrono::milliseconds(10);

}  // namespace pycollective
