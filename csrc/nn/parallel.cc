#include "nn/parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "support/cores.h"
#include "support/lasting.h"
#include "support/origin.h"
#include "support/tuning.h"
#include "support/waiter.h"

namespace pycollective::nn {
namespace {

// OMP_NUM_THREADS is what launchers share out the cores of a host with.
int threads_at_first() {
  const char* asked = std::getenv("OMP_NUM_THREADS");
  const int number = asked ? std::atoi(asked) : 0;
  const int cores = usable_cores();
  return number > 0 ? std::min(number, cores) : cores;
}

std::atomic<int> allowed{threads_at_first()};

// Threads that wait for work, made when they are first needed.
class Team {
 public:
  const Origin origin;

  // Returns false, having done nothing, if the team works for somebody else, or has ended.
  bool run(int parts, const std::function<void(int)>& body) {
    const std::unique_lock mine(busy_, std::try_to_lock);
    if (!mine || stop_) return false;
    std::unique_lock lock(mutex_);
    while (static_cast<int>(helpers_.size()) < parts - 1) {
      helpers_.emplace_back([this] { help(); });
    }
    body_ = &body;
    parts_ = parts;
    next_ = 0;
    calls_.fetch_add(1, std::memory_order_relaxed);
    lock.unlock();
    wake_.notify_all();
    take(lock);
    work(lock);
    if (working_ > 0) spin(lock, [this] { return working_ == 0; });
    done_.wait(lock, [this] { return working_ == 0; });
    return true;
  }

  // Ends its threads, after the work that is under way.
  void end() {
    const std::lock_guard mine(busy_);
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
      calls_.fetch_add(1, std::memory_order_relaxed);
    }
    wake_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
    helpers_.clear();
  }

 private:
  // Polls a condition that becomes true soon, as the next kernel of a step comes soon. The lock is
  // released meanwhile.
  template <typename Condition>
  static void spin(std::unique_lock<std::mutex>& lock, const Condition& condition) {
    lock.unlock();
    spin_until({kTeamSpins, kTeamYields}, condition);
    take(lock);
  }

  // The lock is never held for long.
  static void take(std::unique_lock<std::mutex>& lock) {
    if (!spin_until({kTeamSpins, 0}, [&] { return lock.try_lock(); })) lock.lock();
  }

  // Takes parts as long as there are any; `lock` is held when this is called and when it returns.
  void work(std::unique_lock<std::mutex>& lock) {
    working_.fetch_add(1, std::memory_order_relaxed);
    while (next_ < parts_) {
      const int part = next_++;
      lock.unlock();
      (*body_)(part);
      take(lock);
    }
    working_.fetch_sub(1, std::memory_order_relaxed);
  }

  void help() {
    std::unique_lock lock(mutex_);
    while (true) {
      if (!stop_ && next_ >= parts_) {
        const unsigned known = calls_.load(std::memory_order_relaxed);
        spin(lock, [&] { return calls_.load(std::memory_order_relaxed) != known; });
      }
      wake_.wait(lock, [this] { return stop_ || next_ < parts_; });
      if (stop_) return;
      work(lock);
      if (working_ == 0) done_.notify_one();
    }
  }

  std::mutex busy_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> helpers_;
  const std::function<void(int)>* body_ = nullptr;
  int parts_ = 0, next_ = 0;
  // Changed only by who has the lock; others may look.
  std::atomic<int> working_{0};
  std::atomic<unsigned> calls_{0};
  bool stop_ = false;  // changed by who has both locks
};

// After fork() the child has none of the threads: it gets a team of its own, and the old one is
// left alone.
class Holder {
 public:
  Team& get() {
    Team* team = team_.load(std::memory_order_acquire);
    if (team && team->origin.is_here()) return *team;
    Team* made = new Team;
    if (team_.compare_exchange_strong(team, made)) return *made;
    delete made;  // another thread was first
    return *team;
  }
  void end() {
    Team* team = team_.load();
    if (team && team->origin.is_here()) team->end();
  }

 private:
  std::atomic<Team*> team_{nullptr};
};

// Its threads end with the process; itself it stays, for Python's daemon threads may still call.
const struct AtExit {
  ~AtExit() { lasting<Holder>().end(); }
} at_exit;

}  // namespace

int threads() { return allowed.load(std::memory_order_relaxed); }
void set_threads(int count) { allowed.store(std::max(count, 1), std::memory_order_relaxed); }

void in_parallel(int parts, const std::function<void(int)>& body) {
  if (parts > 1 && lasting<Holder>().get().run(parts, body)) return;
  for (int part = 0; part < parts; ++part) body(part);
}

}  // namespace pycollective::nn
