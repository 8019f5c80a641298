// How a rank waits: it looks again some times, yields some times, then sleeps until a peer rings.
#pragma once

#include <atomic>
#include <thread>

#include "support/asymmetric_barrier.h"
#include "support/cores.h"
#include "support/futex.h"
#include "support/pause.h"
#include "support/tuning.h"
#include "transport/transport.h"

namespace pycollective {

// Where a rank sleeps; in memory that its peers can reach.
struct alignas(kCacheLine) WaitQueue {
  std::atomic<std::uint32_t> wake_ups{
      0};  // rung when a peer has done something and this rank sleeps
  std::atomic<std::uint32_t> sleeping{0};
  // Whether the rank that sleeps here can interrupt whoever wakes it (asymmetric_barrier.h); not
  // until it has said so.
  std::atomic<std::uint32_t> interrupts{0};

  // Before the first sleep, by the rank that sleeps here, as the two below.
  void make() { interrupts.store(can_interrupt()); }
  // Returns what sleep() needs to know. The rank must look once more before it sleeps.
  std::uint32_t announce_sleep() {
    std::uint32_t heard = wake_ups.load();
    sleeping.store(1);
    if (!heavy_barrier() && interrupts.load()) interrupts.store(0);  // it may not any more
    return heard;
  }
  void end_sleep() { sleeping.store(0); }

  void wake_if_asleep() {
    // Pairs with announce_sleep: either we see that the rank sleeps, or it sees what we have done
    // before this call.
    light_barrier(interrupts.load(std::memory_order_relaxed) != 0);
    if (sleeping.load(std::memory_order_relaxed)) ring();
  }
  void ring() {
    wake_ups.fetch_add(1);
    futex_wake_all(wake_ups);
  }
};

// Whether there are more ranks than cores for them.
inline bool crowded(int ranks_on_this_host) { return ranks_on_this_host > usable_cores(); }

// How many looks are worth while: in a crowd, spinning keeps the others from working.
inline int spins_in(bool crowd) { return crowd ? kCrowdedSpins : kSpins; }

// Calls `attempt` until it is done. `failed()` says whether the group has failed, `check()` then
// throws; `look_up()` is called every kWaitSlice, and `time_out()`, which throws, at the deadline.
template <class Failed, class Check, class LookUp, class TimeOut>
void wait_until_done(const std::function<Progress()>& attempt, WaitQueue& queue, int spins,
                     Clock::time_point deadline, const Interrupt& interrupt, Failed failed,
                     Check check, LookUp look_up, TimeOut time_out) {
  const int yields = spins < kSpins ? kYields : kHostYields;
  int looks = 0;  // in vain, since the last progress
  auto next_look_up = Clock::now() + kWaitSlice;
  for (;;) {
    Progress progress = attempt();
    if (progress == Progress::done) return;
    Clock::time_point now;
    if (progress == Progress::moved) {
      looks = 0;
      now = Clock::now();
    } else {
      ++looks;
      if (looks <= spins) {
        pause();
        continue;
      }
      if (failed()) {
        // A peer that has done its part of this call may have failed in the next one.
        progress = attempt();
        if (progress == Progress::done) return;
        if (progress == Progress::moved) continue;
        if (interrupt) interrupt();  // Ctrl-C says more than the peers' leaving because of it
        check();
      }
      if (looks <= spins + yields) {
        std::this_thread::yield();
        continue;
      }
      std::uint32_t heard = queue.announce_sleep();
      progress = attempt();
      now = Clock::now();
      if (progress == Progress::blocked && !failed() && now < next_look_up) {
        futex_wait(queue.wake_ups, heard, next_look_up - now);
        now = Clock::now();
      }
      queue.end_sleep();
      if (progress == Progress::done) return;
      if (progress == Progress::moved) looks = 0;
    }
    if (now < next_look_up) continue;
    next_look_up = now + kWaitSlice;
    if (interrupt) interrupt();
    look_up();
    if (now >= deadline) time_out();
  }
}

}  // namespace pycollective
