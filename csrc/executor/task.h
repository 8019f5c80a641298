// A call that goes on while its caller does something else, and its outcome.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <stdexcept>
#include <utility>

#include "support/origin.h"
#include "support/waiter.h"

namespace pycollective {

// Errors are kept until somebody asks.
class Task {
 public:
  // `kept` is what the call needs until it is done.
  explicit Task(std::shared_ptr<void> kept) : kept_(std::move(kept)), began_(Clock::now()) {}
  virtual ~Task() = default;
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;

  bool done() const { return done_.load(std::memory_order_acquire); }
  bool succeeded() const { return done() && !error_; }
  // False if it is not done at the deadline, which does not end it. Throws what `interrupt` throws,
  // and std::logic_error in a forked child, where nobody goes on with it.
  virtual bool wait(Clock::time_point deadline, const Interrupt& interrupt) = 0;
  // The caller of wait() keeps this until wait() has returned.
  virtual std::shared_ptr<void> driver() = 0;
  // When it began and ended, once it is done.
  Clock::time_point began() const { return began_; }
  Clock::time_point ended() const { return ended_; }
  // Throws what the call has thrown, if anything.
  void check() {
    if (!error_) return;
    note_told();
    std::rethrow_exception(error_);
  }

  // The thread that makes the call says when it begins, and when it is done, well or not.
  void begin() { began_ = Clock::now(); }
  void finish(std::exception_ptr error) noexcept {
    error_ = error;
    ended_ = Clock::now();
    done_.store(true, std::memory_order_release);
  }
  // Lets go of what it has kept.
  void release() { kept_.reset(); }

 protected:
  // The program gets the error. Until then, close() still has to raise a mismatch.
  virtual void note_told() = 0;
  void refuse_in_child() const {
    if (origin_.is_here() || done()) return;
    throw std::logic_error(
        "this call belongs to the parent process: a forked child has no part in it");
  }

 private:
  std::shared_ptr<void> kept_;
  const Origin origin_;
  std::exception_ptr error_;
  Clock::time_point began_, ended_;
  std::atomic<bool> done_{false};
};

}  // namespace pycollective
