// The processor's cores that this process may use.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>

namespace pycollective {

// A bit for each core of the machine. Cores beyond these are left out.
using CoreSet = std::array<std::uint64_t, 16>;

// The cores of this process's affinity.
CoreSet affinity();
// Cores that the CPU quotas of this process's control groups allow, of version 1 or 2 and of all
// groups around its own; 0 without a quota. `root` stands before all paths, for tests.
double quota_of_cores(const std::string& root = "");

// Bytes of the last-level cache; what it mostly has, where the system does not say.
std::size_t last_level_cache();

inline int count_of(const CoreSet& cores) {
  int count = 0;
  for (std::uint64_t word : cores) count += std::popcount(word);
  return count;
}

// As many of these cores as a quota, if it is one, allows to run all the time; at least one.
inline int within_quota(int cores, double quota) {
  return std::max(1, quota > 0 ? std::min(cores, static_cast<int>(quota)) : cores);
}

// The number of cores that this process may use, read once: later changes do not count.
inline int usable_cores() {
  static const int cores = within_quota(count_of(affinity()), quota_of_cores());
  return cores;
}

// Returns true if there are more threads than cores for them.
inline bool crowded(int threads) { return threads > usable_cores(); }

}  // namespace pycollective
