// A failure in the format in which processes exchange it, through shared memory or TCP.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>

#include "support/failure.h"

namespace pycollective {

// Plain data. Another process may write any bytes, so failure_in() checks each field.
struct FailureRecord {
  static constexpr std::size_t kRanks = 4096;  // it can name the first ranks of a group only
  std::uint32_t kind;
  std::uint32_t reserved;
  std::uint64_t ranks[kRanks / 64];  // a bit for each rank
  char calls[2][256];
  char message[4000];  // the last member, because a TCP frame sends its used bytes only
};

FailureRecord record_of(const Failure& failure) noexcept;

// Returns the failure in a record from a group of `size` ranks; nothing if a field is invalid.
std::optional<Failure> failure_in(const FailureRecord& record, int size);

// Returns the text of a field, which may lack the final zero.
template <std::size_t N>
std::string_view text_in(const char (&field)[N]) {
  return {field, strnlen(field, N)};
}

}  // namespace pycollective
