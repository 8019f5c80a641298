// What goes over a connection: frames, each a header, a text and a part of a message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "transport/failure_record.h"

namespace pycollective::tcp {

// Parts are multiples of this, but for the last of a message: whole items of every type.
inline constexpr std::size_t kPartUnit = 16;
// Most bytes of a call's description in a message, and of a control frame's text.
inline constexpr std::size_t kCallText = 256;
inline constexpr std::size_t kControlText = sizeof(FailureRecord);

enum class Kind : std::uint16_t {
  message = 1,
  in_call = 2,
  failed = 3,  // with a FailureRecord, whose message may be shorter
  left = 4,    // with the rank's last calls
  idle = 5,
  calls = 6,       // the rank's last calls, because one of them differs from the receiver's
  in_message = 7,  // between two ranks, in which the rank waits; or empty
  wake_up = 8,     // ends a poll(): something has come another way
};

struct Header {
  std::uint32_t magic = 0x6c6c6f63;  // "coll"; another byte order shows here
  std::uint16_t version = 3;
  Kind kind{};
  std::uint64_t fingerprint = 0;
  std::uint64_t call = 0;       // its number; of a rank that leaves, its last call's
  std::uint64_t remaining = 0;  // bytes of the message, this part's and those to come
  std::uint32_t bytes = 0;      // of this part
  std::uint32_t text = 0;
  std::uint32_t reserved[6] = {};
};
static_assert(sizeof(Header) == 64);  // so that what follows is aligned

// What is wrong with a message's header, in words ("... sent X"); null if nothing is. No length in
// it is to be believed before.
const char* wrong_with_message(const Header& header);

// Whether a header can be one of a control frame.
bool is_control(const Header& header);

// The text of a frame of kind `failed`: a FailureRecord.
std::string text_of(const Failure& failure);
// Returns the failure of a group of `size` ranks; nothing if the text is no FailureRecord.
std::optional<Failure> failure_in(std::string_view text, int size);

// Text from elsewhere: valid UTF-8 without control characters, whatever came.
std::string clean(std::string_view text);

}  // namespace pycollective::tcp
