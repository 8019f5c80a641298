#include "support/parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <limits>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "support/cores.h"
#include "support/lasting.h"
#include "support/origin.h"
#include "support/tuning.h"
#include "support/waiter.h"

namespace pycollective {
namespace {

// Launchers divide the cores of a host among processes with OMP_NUM_THREADS.
int threads_at_first() {
  const char* asked = std::getenv("OMP_NUM_THREADS");
  const int number = asked ? std::atoi(asked) : 0;
  const int cores = usable_cores();
  return number > 0 ? std::min(number, cores) : cores;
}

std::atomic<int> allowed{threads_at_first()};

// Threads that wait for work. They are started when they are first needed.
class Team {
 public:
  const Origin origin;

  // Returns false, without doing anything, if the team is busy for another caller or has ended.
  bool run(int parts, const std::function<void(int)>& body) {
    const std::unique_lock busy(busy_, std::try_to_lock);
    if (!busy || stop_) return false;
    std::unique_lock lock(mutex_);
    start_helpers(parts - 1);
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
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
    return true;
  }

  // Ends the threads after the current work.
  void end() {
    const std::lock_guard busy(busy_);
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
  // If the system refuses a thread, the existing threads and the caller do all parts.
  void start_helpers(int count) {
    try {
      while (static_cast<int>(helpers_.size()) < count) helpers_.emplace_back([this] { help(); });
    } catch (const std::system_error&) {
    }
  }

  // Polls a condition that usually becomes true soon, because the next kernel of a step follows
  // soon. Releases the lock meanwhile.
  template <typename Condition>
  static void spin(std::unique_lock<std::mutex>& lock, const Condition& condition) {
    lock.unlock();
    spin_until({kTeamSpins, kTeamYields}, condition);
    take(lock);
  }

  // Spins first: no thread holds the lock for long.
  static void take(std::unique_lock<std::mutex>& lock) {
    if (!spin_until({kTeamSpins, 0}, [&] { return lock.try_lock(); })) lock.lock();
  }

  // Does parts while there are any; after an exception there are none. The caller holds `lock`.
  void work(std::unique_lock<std::mutex>& lock) {
    working_.fetch_add(1, std::memory_order_relaxed);
    while (next_ < parts_) {
      const int part = next_++;
      lock.unlock();
      std::exception_ptr error;
      try {
        (*body_)(part);
      } catch (...) {
        error = std::current_exception();
      }
      take(lock);
      if (!error) continue;
      if (!error_) error_ = error;
      next_ = parts_;
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
  std::exception_ptr error_;  // the first of the current call; run() throws it
  // Written with mutex_ held; read without it while spinning.
  std::atomic<int> working_{0};
  std::atomic<unsigned> calls_{0};
  bool stop_ = false;  // written with both mutexes held
};

// Makes a new team after fork(): a child has none of its parent's threads. The old team is leaked.
class Holder {
 public:
  Team& get() {
    Team* team = team_.load(std::memory_order_acquire);
    if (team && team->origin.is_here()) return *team;
    Team* made = new Team;
    if (team_.compare_exchange_strong(team, made)) return *made;
    delete made;  // another thread set it first
    return *team;
  }
  void end() {
    Team* team = team_.load();
    if (team && team->origin.is_here()) team->end();
  }

 private:
  std::atomic<Team*> team_{nullptr};
};

// Ends the threads at the end of the process. The holder itself stays, because Python's daemon
// threads may still call kernels.
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

void in_parts(std::int64_t count, const std::function<void(std::int64_t, std::int64_t)>& body) {
  in_parts(count, std::numeric_limits<std::int64_t>::max(), body);
}

void in_parts(std::int64_t count, std::int64_t products,
              const std::function<void(std::int64_t, std::int64_t)>& body) {
  constexpr std::int64_t kFewProducts = 1 << 20;
  const std::int64_t useful = std::max<std::int64_t>(products / kFewProducts, 1);
  const int parts = static_cast<int>(std::min({std::int64_t{threads()}, count, useful}));
  in_parallel(parts, [&](int part) {
    body(begin_of_part(count, part, parts), begin_of_part(count, part + 1, parts));
  });
}

}  // namespace pycollective
