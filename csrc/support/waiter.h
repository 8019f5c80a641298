// The waiter: a waiting thread spins, yields, then sleeps until a wake-up. Every kWaitSlice it
// checks Ctrl-C, lost ranks and its deadline.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <utility>

#include "support/cores.h"
#include "support/pause.h"
#include "support/tuning.h"

namespace pycollective {

using Clock = std::chrono::steady_clock;

// The last bits of a time in ns, for shared memory: the processes of a host have the same clock.
inline std::uint32_t short_time(Clock::time_point time) {
  const auto since = std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch());
  return static_cast<std::uint32_t>(since.count());
}
// Returns the time with these bits that is within 2 s of `near`.
inline Clock::time_point time_near(Clock::time_point near, std::uint32_t bits) {
  return near + std::chrono::nanoseconds(static_cast<std::int32_t>(bits - short_time(near)));
}

// Returns time_point::max() if the sum is larger.
inline Clock::time_point later(Clock::time_point time, Clock::duration by) {
  return time < Clock::time_point::max() - by ? time + by : Clock::time_point::max();
}

// Called by a waiter that holds no lock. May throw to end the wait.
using Interrupt = std::function<void()>;

// The result of a poll. `moved`: the wait is not over, but there was progress.
enum class Progress { done, moved, blocked };

// A thread polls `spins` times with a pause instruction between polls, then `yields` times with a
// yield between polls, then sleeps.
struct SpinLimit {
  int spins = 0;
  int yields = 0;
  bool may_move = false;  // A yield may move the thread to another core.
};

// The limit for polls that read memory.
inline SpinLimit memory_spin_limit(bool oversubscribed) {
  return oversubscribed ? SpinLimit{kOversubscribedSpins, kYields}
                        : SpinLimit{kSpins, kHostYields, true};
}
// The limit for polls that are system calls.
inline SpinLimit socket_spin_limit(bool oversubscribed) {
  return {oversubscribed ? kOversubscribedSpins : kTcpSpins, kYields};
}

// Counts the unsuccessful polls since the last progress.
class Backoff {
 public:
  void reset() { polls_ = 0; }
  // Each pauses or yields once and returns true, or returns false if the limit is used up.
  bool spin(SpinLimit limit) {
    if (polls_ >= limit.spins) return false;
    ++polls_;
    pause();
    return true;
  }
  bool yield(SpinLimit limit) {
    if (polls_ >= limit.spins + limit.yields) return false;
    ++polls_;
    if (limit.may_move) {
      yield_or_change_core();
    } else {
      std::this_thread::yield();
    }
    return true;
  }

 private:
  int polls_ = 0;
};

// Polls a condition up to the limit. Returns true if it became true.
template <class Condition>
bool spin_until(SpinLimit limit, Condition&& condition) {
  for (Backoff backoff; !condition();) {
    if (!backoff.spin(limit) && !backoff.yield(limit)) return false;
  }
  return true;
}

// A thread that can sleep, with its view of the peers for which it waits.
class Sleeper {
 public:
  virtual ~Sleeper() = default;
  virtual SpinLimit spin_limit() = 0;
  // Between announce_sleep() and end_sleep(), a peer that makes progress wakes this thread. The
  // waiter polls once more after the announcement, because earlier progress woke nobody.
  virtual void announce_sleep() {}
  virtual void end_sleep() {}
  // Sleeps until a wake-up, at most for `limit`. Returns false if a signal ended the sleep.
  virtual bool sleep(Clock::duration limit) = 0;

  // Returns true if this thread knows, without a system call, that the group has failed.
  virtual bool has_failed() { return false; }
  // Throws the group's failure.
  virtual void check() {}
  // Exchanges notifications with the peers, every kWaitSlice. Throws if a peer is lost.
  virtual void check_peers() {}
  // Called before check_peers() if this thread did not run for `missed`.
  virtual void extend_deadlines(Clock::duration /*missed*/) {}
};

// `Poll` returns a Progress.
template <class Poll>
class Waiter {
 public:
  Waiter(Sleeper& sleeper, Poll poll, Clock::time_point deadline, const Interrupt& interrupt)
      : sleeper_(sleeper), poll_(std::move(poll)), deadline_(deadline), interrupt_(interrupt) {}

  // Returns true when the poll returns `done`, false at the deadline. The deadline does not include
  // time in which this thread did not run: its peers may have waited for it. It includes the time
  // of the interrupt, which may wait for the GIL. Throws the interrupt's error or the group's
  // failure.
  bool wait() {
    next_check_ = std::min(Clock::now() + kWaitSlice, deadline_);
    for (;;) {
      Progress progress = poll_();
      if (progress == Progress::blocked) {
        const SpinLimit limit = sleeper_.spin_limit();
        if (backoff_.spin(limit)) continue;
        if (sleeper_.has_failed()) {
          progress = poll_after_failure();
        } else if (backoff_.yield(limit)) {
          continue;
        } else {
          progress = sleep();
        }
      }
      if (progress == Progress::done) return true;
      if (progress == Progress::moved) backoff_.reset();
      const auto now = Clock::now();
      if (now < next_check_) continue;
      if (const auto missed = now - std::max(next_check_, interrupted_); missed > kWaitSlice) {
        deadline_ = later(deadline_, missed);
        sleeper_.extend_deadlines(missed);
      }
      interrupt();
      sleeper_.check_peers();
      const auto checked = std::max(now, interrupted_);
      if (checked >= deadline_) return poll_() == Progress::done;
      next_check_ = std::min(checked + kWaitSlice, deadline_);
    }
  }

 private:
  void interrupt() {
    if (!interrupt_) return;
    interrupt_();
    interrupted_ = Clock::now();
  }

  // The data for this call may have arrived before the failure. Then the next call reports the
  // failure.
  Progress poll_after_failure() {
    Progress progress = poll_();
    if (progress != Progress::blocked) return progress;
    interrupt();  // Ctrl-C is the cause of the peers' failure
    sleeper_.check();
    return progress;
  }

  Progress sleep() {
    const auto limit = next_check_ - Clock::now();
    if (limit <= Clock::duration::zero()) return Progress::blocked;
    sleeper_.announce_sleep();
    const Announced announced{sleeper_};
    const Progress progress = poll_();
    if (progress == Progress::blocked && !sleeper_.sleep(limit)) interrupt();
    return progress;
  }

  struct Announced {
    Sleeper& sleeper;
    ~Announced() { sleeper.end_sleep(); }
  };

  Sleeper& sleeper_;
  Poll poll_;
  Clock::time_point deadline_;
  const Interrupt& interrupt_;
  Backoff backoff_;
  Clock::time_point next_check_;
  Clock::time_point interrupted_;  // the end of the last interrupt
};

}  // namespace pycollective
