// A transport moves bytes between ranks. The executor sees one rank's Endpoint and nothing else.
//
// All calls but wait() return at once, so that one thread can run several ranks in turn. A message
// carries the fingerprint of the collective call it belongs to; a receiver that finds another one
// than its own fails the group with a mismatch that names both calls.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "support/failure.h"
#include "support/waiter.h"

namespace pycollective {

// What a rank is doing, for messages about it, and for finding out calls that do not belong
// together. Plain data, which processes share.
struct CallRecord {
  static constexpr int kMaxDims = 8;
  static constexpr std::int64_t kNextArray = -2;
  char collective[24] = "";
  char algorithm[32] = "";
  char op[8] = "";  // empty where there is none
  char dtype[16] = "";
  std::int32_t root = -1;             // -1 where there is none
  std::int32_t dims = 0;              // the first kMaxDims are kept
  std::int64_t shape[kMaxDims] = {};  // -1: any; kNextArray: what follows is of another array
  std::uint64_t detail = 0;           // a hash of what else must agree
  std::uint64_t identity = 0;         // a hash of all the above: seal()
  std::uint64_t number = 0;           // calls of this rank so far, this one included
  // Equal on two ranks exactly when this call and all calls before it belong together (up to 64-bit
  // collisions): calls that differ are found later, even where nobody received anything in them.
  std::uint64_t fingerprint = 0;

  void seal();
  std::string describe() const;
};

// The fingerprint of a call that comes after calls with the fingerprint `before`.
std::uint64_t fingerprint_after(std::uint64_t before, std::uint64_t identity);

// A rank's last calls. Plain data; a call that repeats the last one is not copied.
class CallHistory {
 public:
  static constexpr std::uint64_t kLength = 16;

  // Counts one more call, whose record is sealed.
  void add(const CallRecord& call);
  std::uint64_t number() const { return number_; }
  std::uint64_t fingerprint() const { return fingerprint_; }
  bool has(std::uint64_t number) const {
    return number > 0 && number <= number_ && number_ - number < kLength;
  }
  // The fingerprint of a call, and its record, of a number that it has.
  std::uint64_t fingerprint_of(std::uint64_t number) const {
    return entries_[number % kLength].fingerprint;
  }
  CallRecord record_of(std::uint64_t number) const;
  // The record of the last call; one without a name before the first.
  CallRecord last() const { return number_ ? record_of(number_) : CallRecord(); }

 private:
  struct Entry {
    std::uint64_t fingerprint, record;
  };
  std::uint64_t number_ = 0, fingerprint_ = 0, record_ = 0;
  Entry entries_[kLength] = {};
  CallRecord records_[kLength];
};

// Copies a name, or as much of it as there is room for.
template <std::size_t N>
void set_name(char (&target)[N], std::string_view name) {
  std::size_t bytes = std::min(name.size(), N - 1);
  std::memcpy(target, name.data(), bytes);
  std::memset(target + bytes, 0, N - bytes);
}

// Part of a message, in memory that can be read until release().
struct Piece {
  const void* data = nullptr;
  std::size_t bytes = 0;
};

class Board;
class Group;

class Endpoint : public Sleeper {
 public:
  virtual int rank() const = 0;

  // Begins / ends a collective call of this rank, whose record is sealed. `leave` waits until no
  // peer reads this rank's memory.
  virtual void enter(const CallRecord& call) = 0;
  virtual void leave() noexcept = 0;
  // The last call of this rank, for the thread that is in it.
  virtual CallRecord call() const = 0;
  // What the ranks share besides messages; nullptr where they are not all on one host.
  virtual Board* board() { return nullptr; }

  // Offers a message to a peer, which may read it until flushed() is true. False: no room yet.
  virtual bool try_send(int peer, const void* data, std::size_t bytes) = 0;
  // The next part of a peer's message of which `remaining` bytes are to come; data is nullptr when
  // there is none yet. Parts are whole items. release() when it has been read.
  virtual Piece try_receive(int peer, std::size_t remaining) = 0;
  // The same where the message is to go to `target`, which has room for the rest of it: the part
  // may be there already.
  virtual Piece try_receive_into(int peer, std::size_t remaining, void* /*target*/) {
    return try_receive(peer, remaining);
  }
  virtual void release(int peer) = 0;
  // Grows whenever a part of a message has come or gone.
  virtual std::uint64_t moved() const { return 0; }
  // Goes on with messages that did not fit at once.
  virtual void progress() {}
  // Whether peers have read all that was sent; whether one of them has.
  virtual bool flushed() = 0;
  virtual bool flushed_to(int peer) = 0;

  // Calls `attempt` until it is done, as a waiter (support/waiter.h). Returns false at the
  // deadline. Throws the group's failure, and what `interrupt` throws.
  bool wait(const std::function<Progress()>& attempt, Clock::time_point deadline,
            const Interrupt& interrupt);

  // Fails the group because the call's time is over, and throws that.
  [[noreturn]] void time_out();

  // The ranks that a waiting call was last found to wait for, which a deadline's error names.
  void note_awaited(const std::vector<int>& ranks) { awaited_ = ranks; }
  const std::vector<int>& awaited() const { return awaited_; }

  // Throws the group's failure when it has one.
  void check() override = 0;
  // Fails the whole group, unless it has failed already: every rank's present or next call throws.
  virtual void fail(const Failure& failure) noexcept = 0;

  // A call of this rank has thrown the group's failure. A close() of the rank need not throw a
  // mismatch again.
  void note_thrown() noexcept { has_thrown_.store(true, std::memory_order_relaxed); }
  bool has_thrown() const { return has_thrown_.load(std::memory_order_relaxed); }
  // While a thread makes an asynchronous call: the program gets its error later.
  class Silence {
   public:
    explicit Silence(Endpoint& endpoint) : endpoint_(endpoint), before_(endpoint.has_thrown()) {}
    ~Silence() { endpoint_.has_thrown_.store(before_, std::memory_order_relaxed); }
    Silence(const Silence&) = delete;
    Silence& operator=(const Silence&) = delete;

   private:
    Endpoint& endpoint_;
    const bool before_;
  };

 private:
  virtual Group& group() = 0;

  std::vector<int> awaited_;
  std::atomic<bool> has_thrown_{false};
};

}  // namespace pycollective
