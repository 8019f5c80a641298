// An asynchronous call and its result.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "support/origin.h"
#include "support/waiter.h"
#include "transport/group.h"

namespace pycollective {

// Keeps the call's error until check().
class Task {
 public:
  // Receives the error of a call that no program can retrieve any more, with a description of the
  // call. Called by any thread.
  using OnDropped = void (*)(int rank, const std::string& call, const std::exception_ptr& error);
  // Set once, before the first call. A plain pointer, which threads can use until the process ends.
  static OnDropped on_dropped;

  // `kept` holds the objects that the call needs until it is done.
  Task(std::shared_ptr<Group> group, int rank, std::shared_ptr<void> kept)
      : group_(std::move(group)), rank_(rank), kept_(std::move(kept)), began_(Clock::now()) {}
  virtual ~Task() {
    if (error_ && !is_checked_) [[unlikely]]
      drop();
  }
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
    is_checked_ = true;
    endpoint().mark_reported();  // close() need not raise a mismatch again
    std::rethrow_exception(error_);
  }

  // Called by the thread that makes the call. `call` describes a call with an error.
  void begin() { began_ = Clock::now(); }
  void finish(std::exception_ptr error, std::string call = {}) noexcept {
    error_ = error;
    call_ = std::move(call);
    ended_ = Clock::now();
    done_.store(true, std::memory_order_release);
  }
  // Releases `kept`.
  void release() { kept_.reset(); }

 protected:
  Endpoint& endpoint() const { return group_->endpoint(rank_); }
  void refuse_in_child() const {
    if (origin_.is_here() || done()) return;
    throw std::logic_error(
        "a forked child cannot wait for a call of its parent process; wait in the parent");
  }

  const std::shared_ptr<Group> group_;
  const int rank_;

 private:
  // Reports the error, unless the program has it from another call.
  void drop() noexcept;

  std::shared_ptr<void> kept_;
  const Origin origin_;
  std::exception_ptr error_;
  std::string call_;
  std::atomic<bool> is_checked_{false};
  Clock::time_point began_, ended_;
  std::atomic<bool> done_{false};
};

}  // namespace pycollective
