// One rank's steps in the order in which the rank does them, made one at a time by a coroutine:
//
//   Steps ring(int rank, int size) {
//     …
//     co_yield send(next, input(c));
//
// Nothing runs before the first step is asked for. Arguments are passed by value, since a reference
// may not live as long as the coroutine; an algorithm outlives the coroutines of its members.
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
    // The step lies in the coroutine's frame until the coroutine is resumed.
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

  // The next step, valid until next() is called again; nullptr behind the last one. Throws what the
  // coroutine throws.
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
