// A wait queue: threads sleep in it until a peer wakes them. It lies in memory that the peers can
// map.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "support/asymmetric_barrier.h"
#include "support/futex.h"
#include "support/tuning.h"
#include "support/waiter.h"

namespace pycollective {

struct alignas(kCacheLine) WaitQueue {
  std::atomic<std::uint32_t> wake_ups{0};  // wake_if_asleep() counts only while a thread sleeps
  // The number of sleeping threads; kInPoll is set while one of them sleeps in a poll().
  std::atomic<std::uint32_t> sleepers{0};
  static constexpr std::uint32_t kInPoll = std::uint32_t{1} << 31;
  // 1 if the sleeping threads can interrupt the thread that wakes them (asymmetric_barrier.h). 0
  // until prepare().
  std::atomic<std::uint32_t> interrupts{0};

  // Called before the first sleep, by the process whose threads sleep here.
  void prepare() { interrupts.store(can_interrupt()); }

  // Returns the argument of sleep(). The caller must poll once more before it sleeps.
  std::uint32_t announce_sleep() {
    std::uint32_t seen = wake_ups.load();
    sleepers.fetch_add(1);
    if (interrupts.load() == 0) {
      std::atomic_thread_fence(std::memory_order_seq_cst);
    } else if (!heavy_barrier()) {
      interrupts.store(0);  // the permission was withdrawn
    }
    return seen;
  }
  // Returns false if a signal ended the sleep.
  bool sleep(std::uint32_t seen, std::chrono::nanoseconds limit) {
    return futex_wait(wake_ups, seen, limit);
  }
  void end_sleep() { sleepers.fetch_sub(1); }
  // Called before announce_sleep() and after end_sleep() by a thread that sleeps in a poll(), where
  // only a file descriptor can wake it.
  void set_in_poll(bool in_poll) {
    in_poll ? sleepers.fetch_or(kInPoll) : sleepers.fetch_and(~kInPoll);
  }

  // Both return true if a thread sleeps in a poll(). The caller, and no other thread, must then
  // wake it through its descriptor.
  bool wake_if_asleep() {
    // Pairs with announce_sleep(): either this thread sees the sleeper, or the sleeper sees
    // everything that this thread wrote before the call.
    light_barrier(interrupts.load(std::memory_order_relaxed) != 0);
    return sleepers.load(std::memory_order_relaxed) != 0 && wake();
  }
  bool wake() {
    wake_ups.fetch_add(1);
    futex_wake_all(wake_ups);
    return (sleepers.load() & kInPoll) != 0 && (sleepers.fetch_and(~kInPoll) & kInPoll) != 0;
  }
};

// A thread that sleeps in a wait queue.
class QueueSleeper : public Sleeper {
 public:
  QueueSleeper(WaitQueue& queue, SpinLimit limit) : queue_(queue), limit_(limit) {}
  SpinLimit spin_limit() override { return limit_; }
  void announce_sleep() override { seen_ = queue_.announce_sleep(); }
  bool sleep(Clock::duration limit) override { return queue_.sleep(seen_, limit); }
  void end_sleep() override { queue_.end_sleep(); }

 private:
  WaitQueue& queue_;
  const SpinLimit limit_;
  std::uint32_t seen_ = 0;
};

}  // namespace pycollective
