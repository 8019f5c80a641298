#include "executor/progress_thread.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "support/start_thread.h"
#include "support/thread_name.h"
#include "support/tuning.h"
#include "support/waiter.h"

namespace pycollective {

Task::Task(std::function<void()> call, std::shared_ptr<void> kept)
    : call_(std::move(call)), kept_(std::move(kept)), began_(Clock::now()) {}

bool Task::wait(Clock::time_point deadline, const Interrupt& interrupt) {
  QueueSleeper sleeper(waiting_, {kSpins, 0});
  auto poll = [this] {
    if (done()) return Progress::done;
    if (origin_.is_here()) return Progress::blocked;
    throw std::logic_error(
        "this call belongs to the parent process: a forked child has no part in it");
  };
  return Waiter(sleeper, poll, deadline, interrupt).wait();
}

void Task::check() const {
  if (error_) std::rethrow_exception(error_);
}

void Task::run() noexcept {
  std::exception_ptr error;
  began_ = Clock::now();
  try {
    call_();
  } catch (...) {
    error = std::current_exception();
  }
  finish(error);
}

void Task::finish(std::exception_ptr error) noexcept {
  error_ = error;
  ended_ = Clock::now();
  done_.store(true, std::memory_order_release);
  waiting_.wake_if_asleep();
}

ProgressThread::ProgressThread() : thread_(start_thread([this] { run(); })) {}

void ProgressThread::join() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable() && !is_this_thread()) thread_.join();
}

std::shared_ptr<Task> ProgressThread::submit(std::function<void()> call,
                                             std::shared_ptr<void> kept) {
  auto task = std::make_shared<Task>(std::move(call), std::move(kept));
  std::lock_guard lock(mutex_);
  queue_.push_back(task);
  changed_.notify_all();
  return task;
}

void ProgressThread::collect() {
  std::list<std::shared_ptr<Task>> finished;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return queue_.empty() || !queue_.front()->done(); });
    finished.swap(finished_);
  }
  for (const auto& task : finished) {  // which whoever asks for the outcome may still have
    task->call_ = nullptr;
    task->kept_.reset();
  }
}

std::size_t ProgressThread::outstanding() {
  std::lock_guard lock(mutex_);
  // The first one may be done and not be taken off yet.
  return static_cast<std::size_t>(
      std::count_if(queue_.begin(), queue_.end(), [](const auto& task) { return !task->done(); }));
}

void ProgressThread::drain(const Interrupt& interrupt) {
  for (;;) {
    std::shared_ptr<Task> last;
    {
      std::lock_guard lock(mutex_);
      if (queue_.empty()) return;
      last = queue_.back();
    }
    last->wait(Clock::time_point::max(), interrupt);
  }
}

void ProgressThread::run() {
  name_this_thread("pc-progress");
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return ending_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Task& task = *queue_.front();
    lock.unlock();
    task.run();
    lock.lock();
    finished_.splice(finished_.end(), queue_, queue_.begin());
    changed_.notify_all();
  }
}

}  // namespace pycollective
