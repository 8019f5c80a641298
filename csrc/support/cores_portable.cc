#include <algorithm>
#include <thread>

#include "support/cores.h"
#include "support/tuning.h"

namespace pycollective {

CoreSet affinity() {
  CoreSet cores{};
  unsigned count = std::max(1U, std::thread::hardware_concurrency());
  for (unsigned core = 0; core < count && core < 64 * cores.size(); ++core) {
    cores[core / 64] |= std::uint64_t{1} << core % 64;
  }
  return cores;
}

bool yield_or_change_core() {
  std::this_thread::yield();
  return false;
}

double quota_of_cores(const std::string&) { return 0; }

std::size_t last_level_cache() { return kUsualCacheBytes; }

}  // namespace pycollective
