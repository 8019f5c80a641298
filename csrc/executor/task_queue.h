// The asynchronous calls of a communicator, made one after another in the order of submission. A
// thread that waits for a call makes it itself, after the calls before it. While no thread waits,
// the queue's own thread makes the calls.
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
  // Releases the objects that finished tasks kept alive. The queue's thread cannot, because Python
  // objects need the GIL.
  void collect();
  std::size_t outstanding();
  // Returns true if all tasks are done. Takes no lock.
  bool is_empty() const { return submitted_.load(std::memory_order_acquire) == removed_.load(); }
  // Waits until all tasks are done.
  void drain(const Interrupt& interrupt);
  // Ends the queue's thread after all tasks, and waits for its end unless called by that thread.
  void join();
  // Returns true in a forked child, which does not have the queue's thread.
  bool is_of_parent() const { return !origin_.is_here(); }
  bool is_this_thread() const { return std::this_thread::get_id() == thread_.get_id(); }

 private:
  class Runner;
  bool wait(const Task& task, Clock::time_point deadline, const Interrupt& interrupt);
  // With the mutex held.
  bool can_run(bool as_thread) const;
  void run();

  const Origin origin_;
  const std::shared_ptr<const Group> group_;
  std::mutex mutex_;
  std::condition_variable changed_;  // for the thread
  std::condition_variable removed_changed_;
  WaitQueue finished_or_free_;  // for threads in wait()
  std::list<std::shared_ptr<Entry>> queue_, finished_;
  bool is_running_ = false;  // a thread runs the first task
  bool is_idle_ = false;     // the queue's thread sleeps without a limit
  bool is_stopping_ = false;
  Clock::time_point last_submitted_{};
  std::atomic<int> waiting_{0};  // threads that wait for a task
  std::atomic<std::uint64_t> submitted_{0}, removed_{0};
  std::jthread thread_;  // the last member, because the thread uses the others
};

// A task in the queue.
class TaskQueue::Entry : public Task {
 public:
  using Task::Task;
  // Continues the call, and finishes the task when the call is over. Returns false earlier: at the
  // deadline, or when the call must wait for a peer and `stops()` is true. Throws what `interrupt`
  // throws. One thread at a time calls this function, not always the same one.
  virtual bool run(Clock::time_point deadline, const Interrupt& interrupt,
                   const std::function<bool()>& stops) = 0;
  // Returns true if only the queue's thread may run the task.
  virtual bool needs_thread() const { return false; }

  bool wait(Clock::time_point deadline, const Interrupt& interrupt) override;
  std::shared_ptr<void> owner() override { return queue_.lock(); }

 private:
  friend class TaskQueue;
  std::weak_ptr<TaskQueue> queue_;
};

}  // namespace pycollective
