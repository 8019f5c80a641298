// One rank's steps in execution order. A coroutine yields them one at a time:
//
//   Steps ring(int rank, int size) {
//     …
//     co_yield send(next, input(c));
//
// The coroutine starts with the first call of next(). Pass arguments by value, because a reference
// may dangle while the coroutine lives. An algorithm outlives the coroutines of its member
// functions.
#pragma once

#include <coroutine>
#include <iterator>
#include <utility>

namespace pycollective {

struct Step;

class Steps {
 public:
  struct promise_type {
    const Step* yielded = nullptr;

    Steps get_return_object() { return Steps(Handle::from_promise(*this)); }
    std::suspend_always initial_suspend() const noexcept { return {}; }
    std::suspend_always final_suspend() const noexcept { return {}; }
    // The step is in the coroutine's frame until the coroutine resumes.
    std::suspend_always yield_value(const Step& step) noexcept {
      yielded = &step;
      return {};
    }
    void return_void() noexcept { yielded = nullptr; }
    void unhandled_exception() { throw; }
  };

  Steps() = default;
  Steps(Steps&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Steps& operator=(Steps&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Steps() {
    if (handle_) handle_.destroy();
  }

  // Returns the next step, valid until the next call, or nullptr after the last one. Throws the
  // coroutine's exceptions.
  const Step* next() {
    handle_.resume();
    return handle_.promise().yielded;
  }

  class Iterator {
   public:
    explicit Iterator(Steps& steps) : steps_(steps), step_(steps.next()) {}
    const Step& operator*() const { return *step_; }
    void operator++() { step_ = steps_.next(); }
    bool operator==(std::default_sentinel_t) const { return step_ == nullptr; }

   private:
    Steps& steps_;
    const Step* step_;
  };
  Iterator begin() { return Iterator(*this); }
  std::default_sentinel_t end() const { return {}; }

 private:
  using Handle = std::coroutine_handle<promise_type>;
  explicit Steps(Handle handle) : handle_(handle) {}

  Handle handle_;
};

}  // namespace pycollective
