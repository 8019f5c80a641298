// The asynchronous calls of a communicator, made one after the other in the order in which they
// were submitted. A thread that waits for one of them makes it itself, after those before it. A
// thread of the queue makes those for which nobody waits.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

#include "executor/task.h"
#include "support/origin.h"
#include "support/wait_queue.h"
#include "transport/group.h"

namespace pycollective {

class TaskQueue : public std::enable_shared_from_this<TaskQueue> {
 public:
  class Entry;

  // For calls of a rank of this group.
  explicit TaskQueue(std::shared_ptr<const Group> group);
  ~TaskQueue() { join(); }
  TaskQueue(const TaskQueue&) = delete;
  TaskQueue& operator=(const TaskQueue&) = delete;

  void submit(std::shared_ptr<Entry> entry);
  // Lets go of what finished tasks have kept: for a thread that may do that, unlike the queue's.
  void collect();
  std::size_t outstanding();
  // Returns true if none is under way. Takes no lock.
  bool is_empty() const { return submitted_.load(std::memory_order_acquire) == taken_off_.load(); }
  // Waits until all are done.
  void drain(const Interrupt& interrupt);
  // Ends the thread when all tasks are done, and waits for that unless this is the thread.
  void join();
  // Returns true if this process was forked from the one that has the thread.
  bool is_of_parent() const { return !origin_.is_here(); }
  bool is_this_thread() const { return std::this_thread::get_id() == thread_.get_id(); }

 private:
  class Carrying;
  bool wait(const Task& task, Clock::time_point deadline, const Interrupt& interrupt);
  // With the mutex held.
  bool can_carry(bool as_thread) const;
  void run();

  const Origin origin_;
  const std::shared_ptr<const Group> group_;
  std::mutex mutex_;
  std::condition_variable changed_;  // for the thread
  std::condition_variable taken_off_changed_;
  WaitQueue finished_or_free_;  // for those who wait
  std::list<std::shared_ptr<Entry>> queue_, finished_;
  bool carried_ = false;  // a thread carries the first one
  bool resting_ = false;  // the thread sleeps until it is told
  bool ending_ = false;
  Clock::time_point last_submitted_{};
  std::atomic<int> waiting_{0};  // threads that wait for a task
  std::atomic<std::uint64_t> submitted_{0}, taken_off_{0};
  std::jthread thread_;  // the last member: it begins when all is there
};

// A task in the queue.
class TaskQueue::Entry : public Task {
 public:
  using Task::Task;
  // Goes on with the call, and finishes the task when it is over. Returns false before, at the
  // deadline, or where the call cannot go on and `stops()` is true. Throws what `interrupt` throws.
  // One thread at a time calls it, not always the same one.
  virtual bool carry(Clock::time_point deadline, const Interrupt& interrupt,
                     const std::function<bool()>& stops) = 0;
  // Returns true if only the queue's thread can carry it.
  virtual bool needs_thread() const { return false; }

  bool wait(Clock::time_point deadline, const Interrupt& interrupt) override;
  std::shared_ptr<void> driver() override { return queue_.lock(); }

 private:
  friend class TaskQueue;
  std::weak_ptr<TaskQueue> queue_;
};

}  // namespace pycollective
