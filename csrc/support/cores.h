// The cores that this process may use.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>

namespace pycollective {

// A bit for each core of the machine. Cores from number 1024 on are ignored.
using CoreSet = std::array<std::uint64_t, 16>;

// The cores of this process's affinity.
CoreSet affinity();
// Returns the number of cores that the CPU quotas of the process's control groups (version 1 or 2)
// and of their ancestors allow. Returns 0 without a quota. Tests set `root`, a prefix of all paths.
double quota_of_cores(const std::string& root = "");

// Yields. Moves the calling thread to another core of its affinity, at most every kCoreMove, if its
// yields keep letting other threads run. Linux can leave two ranks that yield to each other on one
// core for seconds although another core is idle. Returns true if the thread moved.
bool yield_or_change_core();

// Returns the bytes of the last-level cache, or a usual size if the system does not report it.
std::size_t last_level_cache();

inline int count_of(const CoreSet& cores) {
  int count = 0;
  for (std::uint64_t word : cores) count += std::popcount(word);
  return count;
}

// Returns the number of these cores that a quota (0: none) lets run all the time; at least 1.
inline int within_quota(int cores, double quota) {
  return std::max(1, quota > 0 ? std::min(cores, static_cast<int>(quota)) : cores);
}

// The number of cores that this process may use. Later changes have no effect: it is read once.
inline int usable_cores() {
  static const int cores = within_quota(count_of(affinity()), quota_of_cores());
  return cores;
}

// Returns true if there are more threads than usable cores.
inline bool has_more_than_cores(int threads) { return threads > usable_cores(); }

}  // namespace pycollective
