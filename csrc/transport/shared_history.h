// The last calls of a rank, in shared memory. The rank writes them without waiting for readers: the
// history is a seqlock, whose readers retry.
#pragma once

#include <atomic>
#include <cstdint>

#include "support/tuning.h"
#include "transport/group.h"

namespace pycollective {

class alignas(kCacheLine) SharedHistory {
 public:
  static constexpr std::uint64_t kLength = CallHistory::kLength;

  // Adds a call with its number and fingerprint. `repeats`: its record equals the last one.
  void add(const CallRecord& call, bool repeats);
  std::uint64_t number() const { return number_.load(); }  // of the last call
  // Returns the call with a number; the last call if that one is not in the history.
  CallRecord call(std::uint64_t number) const;

 private:
  // A call that repeats the last one shares its record. With two spare records, a reader finds
  // complete records while the next two are written.
  static constexpr std::uint64_t kRecords = kLength + 2;

  std::atomic<std::uint64_t> writing_;  // odd: a record is being written
  std::atomic<std::uint64_t> number_;
  std::atomic<std::uint64_t> record_of_[kLength];  // by call number; written before `number_`
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

// Returns all calls of a history, the last call first.
KnownCalls known_calls(const SharedHistory& history);

}  // namespace pycollective
