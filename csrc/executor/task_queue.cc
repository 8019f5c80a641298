#include "executor/task_queue.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "support/start_thread.h"
#include "support/thread_name.h"
#include "support/tuning.h"
#include "support/waiter.h"

namespace pycollective {

bool TaskQueue::Entry::wait(Clock::time_point deadline, const Interrupt& interrupt) {
  refuse_in_child();
  auto queue = queue_.lock();
  return queue ? queue->wait(*this, deadline, interrupt) : done();
}

// The right to run the first task, held by one thread.
class TaskQueue::Runner {
 public:
  // With the mutex held.
  explicit Runner(TaskQueue& queue) : entry(*queue.queue_.front()), queue_(queue) {
    queue_.is_running_ = true;
  }
  ~Runner() {
    std::lock_guard lock(queue_.mutex_);
    queue_.is_running_ = false;
    auto& entries = queue_.queue_;
    if (entry.done()) {
      queue_.finished_.splice(queue_.finished_.end(), entries, entries.begin());
      queue_.removed_.fetch_add(1, std::memory_order_release);
      queue_.removed_changed_.notify_all();
    }
    if (!entries.empty() && entries.front()->needs_thread()) queue_.changed_.notify_one();
    queue_.finished_or_free_.wake_if_asleep();
  }
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  Entry& entry;

 private:
  TaskQueue& queue_;
};

TaskQueue::TaskQueue(std::shared_ptr<const Group> group) : group_(std::move(group)) {
  finished_or_free_.prepare();
  thread_ = start_thread([this] { run(); });
}

void TaskQueue::join() {
  {
    std::lock_guard lock(mutex_);
    is_stopping_ = true;
    changed_.notify_one();
  }
  if (thread_.joinable() && !is_this_thread()) thread_.join();
}

void TaskQueue::submit(std::shared_ptr<Entry> entry) {
  entry->queue_ = weak_from_this();
  const bool needs_thread = entry->needs_thread();
  std::lock_guard lock(mutex_);
  queue_.push_back(std::move(entry));
  submitted_.fetch_add(1, std::memory_order_release);
  last_submitted_ = Clock::now();
  if (is_idle_ || needs_thread) changed_.notify_one();
}

void TaskQueue::collect() {
  std::list<std::shared_ptr<Entry>> finished;
  {
    std::unique_lock lock(mutex_);
    removed_changed_.wait(lock, [this] { return queue_.empty() || !queue_.front()->done(); });
    finished.swap(finished_);
  }
  for (const auto& entry : finished) entry->release();
}

std::size_t TaskQueue::outstanding() {
  std::lock_guard lock(mutex_);
  // The first task may be done and not removed yet.
  return static_cast<std::size_t>(std::count_if(queue_.begin(), queue_.end(),
                                                [](const auto& entry) { return !entry->done(); }));
}

void TaskQueue::drain(const Interrupt& interrupt) {
  for (;;) {
    std::shared_ptr<Entry> last;
    {
      std::lock_guard lock(mutex_);
      if (queue_.empty()) return;
      last = queue_.back();
    }
    wait(*last, Clock::time_point::max(), interrupt);
  }
}

bool TaskQueue::can_run(bool as_thread) const {
  if (is_running_ || queue_.empty()) return false;
  if (queue_.front()->needs_thread()) return as_thread;
  return !as_thread || waiting_.load() == 0;
}

bool TaskQueue::wait(const Task& task, Clock::time_point deadline, const Interrupt& interrupt) {
  struct Waiting {
    explicit Waiting(TaskQueue& queue) : queue(queue) { queue.waiting_.fetch_add(1); }
    ~Waiting() {
      queue.waiting_.fetch_sub(1);
      std::lock_guard lock(queue.mutex_);
      // The thread may run again, or end.
      if (!queue.queue_.empty() || queue.is_stopping_) queue.changed_.notify_one();
    }
    TaskQueue& queue;
  };
  if (task.done()) return true;
  const Waiting waiting(*this);
  QueueSleeper sleeper(finished_or_free_, {kSpins, 0});
  std::optional<Runner> runner;
  auto poll = [&] {
    if (task.done()) return Progress::done;
    std::lock_guard lock(mutex_);
    if (!can_run(/*as_thread=*/false)) return Progress::blocked;
    runner.emplace(*this);
    return Progress::done;
  };
  while (!task.done()) {
    if (!Waiter(sleeper, poll, deadline, interrupt).wait()) return task.done();
    if (!runner) continue;
    const bool is_over = runner->entry.run(deadline, interrupt, {});
    runner.reset();
    if (!is_over) return task.done();
  }
  return true;
}

void TaskQueue::run() {
  name_this_thread("pc-progress");
  auto stops = [this] { return waiting_.load() > 0; };
  std::unique_lock lock(mutex_);
  for (;;) {
    if (can_run(/*as_thread=*/true)) {
      {
        const Runner runner(*this);
        lock.unlock();
        runner.entry.run(Clock::time_point::max(), {}, stops);
      }
      lock.lock();
    } else if (is_stopping_ && queue_.empty()) {
      return;
    } else if (Clock::now() - last_submitted_ < kLinger) {
      changed_.wait_for(lock, stand_by(group_->is_oversubscribed()));
    } else {
      is_idle_ = true;
      changed_.wait(lock);
      is_idle_ = false;
    }
  }
}

}  // namespace pycollective
