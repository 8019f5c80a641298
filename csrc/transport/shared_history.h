// The last calls of a rank, in memory that processes share. The rank writes them; its peers read
// them, and never hold it up (a seqlock, which tells a reader that it has to look again).
#pragma once

#include <atomic>
#include <cstdint>

#include "support/tuning.h"
#include "transport/group.h"

namespace pycollective {

class alignas(kCacheLine) SharedHistory {
 public:
  static constexpr std::uint64_t kLength = CallHistory::kLength;

  // Counts one more call, with its number and fingerprint. `repeats`: it is the last one again.
  void add(const CallRecord& call, bool repeats);
  std::uint64_t number() const { return number_.load(); }  // of the last call
  // Returns the call of a number, or the last one, if that one has not begun or is long over.
  CallRecord call(std::uint64_t number) const;

 private:
  // A record is written only for a call that differs from the last one. Two records more than calls
  // let a reader find whole ones while the next two are written.
  static constexpr std::uint64_t kRecords = kLength + 2;

  std::atomic<std::uint64_t> writing_;  // odd: a record is being written
  std::atomic<std::uint64_t> number_;
  std::atomic<std::uint64_t> record_of_[kLength];  // by a call's number, before `number_` says so
  std::atomic<std::uint64_t> fingerprint_of_[kLength];
  CallRecord records_[kRecords];
};

inline void SharedHistory::add(const CallRecord& call, bool repeats) {
  const std::uint64_t number = call.number;
  std::uint64_t record = record_of_[(number - 1) % kLength].load(std::memory_order_relaxed);
  if (!repeats) {
    writing_.fetch_add(1);
    records_[++record % kRecords] = call;
    writing_.fetch_add(1);
  }
  record_of_[number % kLength].store(record, std::memory_order_relaxed);
  fingerprint_of_[number % kLength].store(call.fingerprint, std::memory_order_relaxed);
  number_.store(number, std::memory_order_release);
}

// All that a history has, the last call first.
KnownCalls known_calls(const SharedHistory& history);

}  // namespace pycollective
