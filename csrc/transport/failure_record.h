// A failure as processes tell it to each other, through shared memory or over TCP.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>

#include "support/failure.h"

namespace pycollective {

// Plain data. Another process may have written anything, so failure_in() checks each field.
struct FailureRecord {
  static constexpr std::size_t kRanks = 4096;  // the first ranks of a group, of which it can tell
  std::uint32_t kind;
  std::uint32_t reserved;
  std::uint64_t ranks[kRanks / 64];  // a bit for each
  char calls[2][256];
  char message[4000];  // at the end: a frame has as much of it as there is
};

FailureRecord record_of(const Failure& failure) noexcept;

// Returns the failure of a group of `size` ranks; nothing if a field has a value that it cannot
// have.
std::optional<Failure> failure_in(const FailureRecord& record, int size);

// The text in a field, which may fill the field.
template <std::size_t N>
std::string_view text_in(const char (&field)[N]) {
  return {field, strnlen(field, N)};
}

}  // namespace pycollective
