// A transport moves bytes between ranks. The executor uses the Endpoint of one rank and nothing
// else.
//
// All functions except wait() and leave() return at once, so one thread can run several ranks. A
// message carries the fingerprint of its collective call. If the receiver is in another call, it
// fails the group with a mismatch that names both calls.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/failure.h"
#include "support/waiter.h"

namespace pycollective {

// The description of a rank's collective call, for texts and for the detection of mismatches. Plain
// data, shared between processes.
struct CallRecord {
  static constexpr int kMaxDims = 8;
  static constexpr std::int64_t kNextArray = -2;
  char collective[24] = "";
  char algorithm[32] = "";
  char op[8] = "";  // empty: none
  char dtype[16] = "";
  std::int32_t root = -1;             // -1: none
  std::int32_t dims = 0;              // the first kMaxDims are kept
  std::int64_t shape[kMaxDims] = {};  // -1: any length; kNextArray: between two arrays

  std::uint64_t detail = 0;    // hash of further arguments that must be equal
  std::uint64_t identity = 0;  // hash of the members above, set by seal()
  std::uint64_t number = 0;    // 1 for the first call of a rank
  // Hash of this call and all calls before it. It differs between ranks whose calls differed, so a
  // later call detects a mismatch in a call without messages.
  std::uint64_t fingerprint = 0;

  void seal();
  std::string describe() const;
  // Adds "reproducible" to the algorithm's name.
  void name_reproducible();
};

// Returns the fingerprint of a call after a call with the fingerprint `before`.
std::uint64_t fingerprint_after(std::uint64_t before, std::uint64_t identity);

// A rank's last calls. A call that repeats the last one shares its record.
class CallHistory {
 public:
  static constexpr std::uint64_t kLength = 16;

  // Adds a call. Its record must be sealed.
  void add(const CallRecord& call);
  std::uint64_t number() const { return number_; }
  std::uint64_t fingerprint() const { return fingerprint_; }
  bool has(std::uint64_t number) const {
    return number > 0 && number <= number_ && number_ - number < kLength;
  }
  // Both need has(number).
  std::uint64_t fingerprint_of(std::uint64_t number) const {
    return entries_[number % kLength].fingerprint;
  }
  CallRecord record_of(std::uint64_t number) const;
  // Returns the record of the last call; an empty one before the first call.
  CallRecord last() const { return number_ ? record_of(number_) : CallRecord(); }

 private:
  struct Entry {
    std::uint64_t fingerprint, record;
  };
  std::uint64_t number_ = 0, fingerprint_ = 0, record_ = 0;
  Entry entries_[kLength] = {};
  CallRecord records_[kLength];
};

// Copies a name, truncated to the field.
template <std::size_t N>
void set_name(char (&target)[N], std::string_view name) {
  std::size_t bytes = std::min(name.size(), N - 1);
  std::memcpy(target, name.data(), bytes);
  std::memset(target + bytes, 0, N - bytes);
}

// Part of a message, readable until release().
struct Piece {
  const void* data = nullptr;
  std::size_t bytes = 0;
};

class Board;
class Group;

class Endpoint : public Sleeper {
 public:
  virtual int rank() const = 0;

  // enter() begins a collective call of this rank, with a sealed record. leave() ends it; after a
  // failure it waits until no peer accesses this rank's memory.
  virtual void enter(const CallRecord& call) = 0;
  virtual void leave() noexcept = 0;
  // Returns the last call of this rank. For the thread that makes the call.
  virtual CallRecord call() const = 0;
  // Returns the board (board.h); nullptr if the ranks are on several hosts.
  virtual Board* board() { return nullptr; }

  // Sends a message, whose memory must stay unchanged until flushed() is true. Returns false if the
  // channel is full.
  virtual bool try_send(int peer, const void* data, std::size_t bytes) = 0;
  // Returns the next part of a peer's message with `remaining` bytes left; data is nullptr if no
  // part has arrived. A part has whole items. The caller must call release() after reading it.
  virtual Piece try_receive(int peer, std::size_t remaining) = 0;
  // The same for a message that the caller will copy to `target`, which has space for the rest of
  // the message. The returned part may be at `target` already.
  virtual Piece try_receive_into(int peer, std::size_t remaining, void* /*target*/) {
    return try_receive(peer, remaining);
  }
  virtual void release(int peer) = 0;
  // Counts the parts that were sent and received.
  virtual std::uint64_t moved() const { return 0; }
  // Continues messages that were sent in part.
  virtual void progress() {}
  // Returns true if all peers, or one peer, have read all messages.
  virtual bool flushed() = 0;
  virtual bool flushed_to(int peer) = 0;

  // Calls `attempt` until it is done, as a waiter (support/waiter.h). Returns false at the
  // deadline. Throws the group's failure, and what `interrupt` throws.
  bool wait(const std::function<Progress()>& attempt, Clock::time_point deadline,
            const Interrupt& interrupt);

  // Fails the group with a timeout of the present call, and throws it.
  [[noreturn]] void time_out();

  // The ranks for which the present call waits. time_out() names them.
  void set_awaited(const std::vector<int>& ranks) { awaited_ = ranks; }
  const std::vector<int>& awaited() const { return awaited_; }

  // Throws the group's failure when it has one.
  void check() override = 0;
  // As Group::fail().
  virtual void fail(const Failure& failure) noexcept = 0;

  // Records that a call of this rank has thrown the group's failure. Then close() does not throw a
  // mismatch again.
  void mark_reported() noexcept {
    if (ReportLater::endpoint != this) is_reported_.store(true, std::memory_order_relaxed);
  }
  bool is_reported() const { return is_reported_.load(std::memory_order_relaxed); }
  // While a thread makes an asynchronous call, mark_reported() has no effect in this thread: the
  // program gets the error later, from the call's handle.
  class ReportLater {
   public:
    explicit ReportLater(const Endpoint& of) : before_(std::exchange(endpoint, &of)) {}
    ~ReportLater() { endpoint = before_; }
    ReportLater(const ReportLater&) = delete;
    ReportLater& operator=(const ReportLater&) = delete;

   private:
    friend Endpoint;
    static inline thread_local const Endpoint* endpoint = nullptr;
    const Endpoint* const before_;
  };

 private:
  virtual Group& group() = 0;

  std::vector<int> awaited_;
  std::atomic<bool> is_reported_{false};
};

}  // namespace pycollective
