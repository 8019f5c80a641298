#include <sched.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <sstream>
#include <thread>
#include <vector>

#include "support/cores.h"
#include "support/tuning.h"

namespace pycollective {
namespace {

// A mounted hierarchy of control groups: `place` is the mount point of the directory `root`.
struct Mount {
  std::string root, place;
};

// Returns true if a comma-separated list contains a word.
bool lists(const std::string& list, const std::string& word) {
  return ("," + list + ",").find("," + word + ",") != std::string::npos;
}

// Returns the mounts of version 2, or those of version 1 that have the controller "cpu".
std::vector<Mount> mounts_of(const std::string& root, bool second) {
  std::vector<Mount> found;
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string skipped, type, options;
    Mount mount;
    fields >> skipped >> skipped >> skipped >> mount.root >> mount.place;
    while (fields >> skipped && skipped != "-") continue;
    fields >> type >> skipped >> options;
    if (second ? type == "cgroup2" : type == "cgroup" && lists(options, "cpu")) {
      found.push_back(mount);
    }
  }
  return found;
}

// The quota of one control group; 0 if it has none.
double quota_in(const std::string& directory, bool second) {
  double quota = 0, period = 0;
  if (second) {
    std::ifstream(directory + "/cpu.max") >> quota >> period;  // "max" is not a number
  } else {
    std::ifstream(directory + "/cpu.cfs_quota_us") >> quota;  // -1: none
    std::ifstream(directory + "/cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? quota / period : 0;
}

using Clock = std::chrono::steady_clock;

// The yields of one thread.
class Yields {
 public:
  // Counts a yield that let other threads run for this time. Returns true if the thread should
  // move.
  bool count(Clock::duration others, Clock::time_point now) {
    if (others < kOthersRan) {
      shared_ = std::max(shared_ - 1, 0);
      return false;
    }
    if (++shared_ < limit_ || now < next_) return false;
    shared_ = 0;
    next_ = now + kCoreMove;
    limit_ = kSharedYields + kSharedYields * (next_random() % 4);
    return true;
  }

 private:
  int next_random() {
    random_ = random_ * 1103515245 + 12345;
    return static_cast<int>(random_ >> 16 & 0x7fff);
  }

  // Threads that move at the same moment could meet again on the next core: each has its own limit.
  unsigned random_ =
      static_cast<unsigned>(std::hash<std::thread::id>{}(std::this_thread::get_id()) ^
                            static_cast<std::size_t>(Clock::now().time_since_epoch().count()));
  int limit_ = kSharedYields + kSharedYields * (next_random() % 4);
  int shared_ = 0;
  Clock::time_point next_{};
};

// Moves the calling thread to another core of its affinity, which stays as it is.
bool change_core() {
  cpu_set_t before, others;
  const int core = sched_getcpu();
  if (core < 0 || core >= CPU_SETSIZE) return false;
  if (sched_getaffinity(0, sizeof before, &before) != 0 || CPU_COUNT(&before) < 2) return false;
  others = before;
  CPU_CLR(static_cast<std::size_t>(core), &others);
  if (sched_setaffinity(0, sizeof others, &others) != 0) return false;
  sched_setaffinity(0, sizeof before, &before);
  return true;
}

}  // namespace

bool yield_or_change_core() {
  thread_local Yields yields;
  const auto begin = Clock::now();
  std::this_thread::yield();
  const auto end = Clock::now();
  return yields.count(end - begin, end) && change_core();
}

CoreSet affinity() {
  CoreSet cores{};
  cpu_set_t set;
  CPU_ZERO(&set);
  static_assert(sizeof set <= sizeof cores);
  if (sched_getaffinity(0, sizeof set, &set) != 0) {
    cores[0] = 1;  // the machine has more cores than a cpu_set_t
    return cores;
  }
  for (std::size_t core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores[core / 64] |= std::uint64_t{1} << core % 64;
  }
  return cores;
}

double quota_of_cores(const std::string& root) {
  double least = 0;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "number:controllers:path"
    std::size_t first = line.find(':'), last = line.find(':', first + 1);
    if (first == std::string::npos || last == std::string::npos) continue;
    std::string controllers = line.substr(first + 1, last - first - 1),
                path = line.substr(last + 1);
    bool second = controllers.empty();
    if (!second && !lists(controllers, "cpu")) continue;
    for (const Mount& mount : mounts_of(root, second)) {
      // In a container, the mount or the path begins at the container's own group.
      std::string inner = mount.root == "/" ? path : "";
      if (mount.root != "/" && path.starts_with(mount.root)) inner = path.substr(mount.root.size());
      while (inner.ends_with('/')) inner.pop_back();
      for (;;) {
        double quota = quota_in(root + mount.place + inner, second);
        if (quota > 0) least = least > 0 ? std::min(least, quota) : quota;
        if (inner.empty()) break;
        inner.resize(inner.rfind('/') == std::string::npos ? 0 : inner.rfind('/'));
      }
    }
  }
  return least;
}

std::size_t last_level_cache() {
  // sysconf() returns the sum over all cores on some machines.
  static const std::size_t known = [] {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");
    std::size_t kibibytes = 0;
    return file >> kibibytes ? kibibytes * 1024 : 0;
  }();
  return known > 0 ? known : kUsualCacheBytes;
}

}  // namespace pycollective
