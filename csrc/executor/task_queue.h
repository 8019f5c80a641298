// Calls that go on while their caller does something else: a thread that makes a communicator's
// calls one after the other, in the order in which they were submitted.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

#include "support/origin.h"
#include "support/wait_queue.h"
#include "transport/transport.h"

namespace pycollective {

// One such call. Errors are kept until somebody asks.
class Task {
 public:
  // `kept` is what the call needs to stay there until it is done.
  Task(std::function<void()> call, std::shared_ptr<void> kept);
  virtual ~Task() = default;

  bool done() const { return done_.load(std::memory_order_acquire); }
  // False if it is not done at the deadline, which does not end it. Throws what `interrupt` throws,
  // and std::logic_error in a forked child, where nobody goes on with it.
  virtual bool wait(Clock::time_point deadline, const Interrupt& interrupt);
  // The owner of the call, which must be kept until wait() has returned.
  virtual std::shared_ptr<void> driver() { return nullptr; }
  // When it began and ended, once it is done.
  Clock::time_point began() const { return began_; }
  Clock::time_point ended() const { return ended_; }
  // Throws what the call has thrown, if anything.
  void check() const;
  // It is done, well or not.
  void finish(std::exception_ptr error) noexcept;

 private:
  friend class ProgressThread;
  void run() noexcept;

  std::function<void()> call_;
  std::shared_ptr<void> kept_;
  const Origin origin_;
  std::exception_ptr error_;
  Clock::time_point began_, ended_;
  std::atomic<bool> done_{false};
  WaitQueue waiting_;
};

class ProgressThread {
 public:
  ProgressThread();
  ~ProgressThread() { join(); }

  // Ends the thread when all tasks are done, and waits for that unless this is the thread.
  void join();
  std::shared_ptr<Task> submit(std::function<void()> call, std::shared_ptr<void> kept);
  // Lets go of what finished tasks kept: for a thread that may do that, which this one may not.
  void collect();
  std::size_t outstanding();
  // Waits until all are done.
  void drain(const Interrupt& interrupt);
  // Whether this process was forked from the one that has the thread.
  bool is_of_parent() const { return !origin_.is_here(); }
  bool is_this_thread() const { return std::this_thread::get_id() == thread_.get_id(); }

 private:
  void run();

  const Origin origin_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<std::shared_ptr<Task>> queue_, finished_;  // the first in the queue is running
  bool ending_ = false;
  std::jthread thread_;  // the last member: it begins when all is there
};

}  // namespace pycollective
