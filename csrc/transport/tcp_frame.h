// The frames of TCP connections: a header, a text and a part of a message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "transport/failure_record.h"

namespace pycollective::tcp {

// All parts of a message except the last are multiples of this, so that they have whole items.
inline constexpr std::size_t kPartUnit = 16;
// Limits for the text of a message, which describes the call, and of a control frame.
inline constexpr std::size_t kCallText = 256;
inline constexpr std::size_t kControlText = sizeof(FailureRecord);

enum class Kind : std::uint16_t {
  message = 1,
  in_call = 2,
  failed = 3,  // with a FailureRecord, whose message may be truncated
  left = 4,    // with the rank's last calls
  idle = 5,
  calls = 6,       // the rank's last calls, after one differed from the receiver's
  in_message = 7,  // the point-to-point message in which the rank waits; empty: none
  wake_up = 8,     // ends a poll()
};

struct Header {
  std::uint32_t magic = 0x6c6c6f63;  // "coll"; detects another byte order
  std::uint16_t version = 3;
  Kind kind{};
  std::uint64_t fingerprint = 0;
  std::uint64_t call = 0;       // number of the call; in `left`, of the last call
  std::uint64_t remaining = 0;  // bytes of the message from this part on
  std::uint32_t bytes = 0;      // of this part
  std::uint32_t text = 0;
  std::uint32_t reserved[6] = {};
};
static_assert(sizeof(Header) == 64);  // keeps the data after it aligned

// Returns the error in a message's header, for a text such as "rank 1 sent X"; nullptr if it is
// valid. The lengths in a header must not be used before this check.
const char* wrong_with_message(const Header& header);

// Returns true if a header is valid for a control frame.
bool is_control(const Header& header);

// Returns the text of a `failed` frame: a FailureRecord.
std::string text_of(const Failure& failure);
// Returns the failure in that text from a group of `size` ranks; nothing if it is invalid.
std::optional<Failure> failure_in(std::string_view text, int size);

// Converts text of a peer to valid UTF-8 without control characters.
std::string clean(std::string_view text);

}  // namespace pycollective::tcp
