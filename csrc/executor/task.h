// An asynchronous call and its result.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <stdexcept>
#include <utility>

#include "support/origin.h"
#include "support/waiter.h"

namespace pycollective {

// Keeps the call's error until check().
class Task {
 public:
  // `kept` holds the objects that the call needs until it is done.
  explicit Task(std::shared_ptr<void> kept) : kept_(std::move(kept)), began_(Clock::now()) {}
  virtual ~Task() = default;
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;

  bool done() const { return done_.load(std::memory_order_acquire); }
  bool succeeded() const { return done() && !error_; }
  // Returns false at the deadline, which does not end the call. Throws what `interrupt` throws, and
  // std::logic_error in a forked child, which has no thread that makes the call.
  virtual bool wait(Clock::time_point deadline, const Interrupt& interrupt) = 0;
  // Returns the object whose threads make the call. The caller of wait() must keep it alive until
  // wait() has returned.
  virtual std::shared_ptr<void> owner() = 0;
  // Times of the call, valid when it is done.
  Clock::time_point began() const { return began_; }
  Clock::time_point ended() const { return ended_; }
  // Throws the call's error, if any.
  void check() {
    if (!error_) return;
    mark_reported();
    std::rethrow_exception(error_);
  }

  // Called by the thread that makes the call.
  void begin() { began_ = Clock::now(); }
  void finish(std::exception_ptr error) noexcept {
    error_ = error;
    ended_ = Clock::now();
    done_.store(true, std::memory_order_release);
  }
  // Releases `kept`.
  void release() { kept_.reset(); }

 protected:
  // The program has received the error, so close() need not raise a mismatch again.
  virtual void mark_reported() = 0;
  void refuse_in_child() const {
    if (origin_.is_here() || done()) return;
    throw std::logic_error(
        "a forked child cannot wait for a call of its parent process; wait in the parent");
  }

 private:
  std::shared_ptr<void> kept_;
  const Origin origin_;
  std::exception_ptr error_;
  Clock::time_point began_, ended_;
  std::atomic<bool> done_{false};
};

}  // namespace pycollective
