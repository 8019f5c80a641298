#include "transport/tcp_frame.h"

#include <cstring>

#include "support/tuning.h"
#include "transport/transport.h"

namespace pycollective::tcp {

const char* wrong_with_message(const Header& header) {
  constexpr Header good;
  if (header.magic != good.magic) return "data that is no pycollective message";
  if (header.version != good.version) return "a message of another version of pycollective";
  if (header.kind != Kind::message) return "a frame of an unknown kind";
  if (header.text > kCallText || header.bytes > kTcpPartBytes || header.bytes > header.remaining) {
    return "a message with an invalid length";
  }
  if (header.bytes < header.remaining && (header.bytes == 0 || header.bytes % kPartUnit != 0)) {
    return "a part of a message that splits an item";
  }
  return nullptr;
}

bool is_control(const Header& header) {
  constexpr Header good;
  return header.magic == good.magic && header.version == good.version &&
         header.text <= kControlText && header.bytes == 0 &&
         (header.kind == Kind::in_call || header.kind == Kind::failed ||
          header.kind == Kind::left || header.kind == Kind::idle || header.kind == Kind::calls ||
          header.kind == Kind::in_message || header.kind == Kind::wake_up);
}

std::string text_of(const Failure& failure) {
  const FailureRecord record = record_of(failure);
  return {reinterpret_cast<const char*>(&record),
          offsetof(FailureRecord, message) + text_in(record.message).size()};
}

std::optional<Failure> failure_in(std::string_view text, int size) {
  FailureRecord record{};
  if (text.size() < offsetof(FailureRecord, message) || text.size() > sizeof record) return {};
  std::memcpy(&record, text.data(), text.size());
  for (auto& call : record.calls) set_name(call, clean(text_in(call)));
  set_name(record.message, clean(text_in(record.message)));
  return pycollective::failure_in(record, size);
}

std::string clean(std::string_view text) {
  std::size_t bytes = text.size();
  std::string result;
  for (std::size_t i = 0; i < bytes;) {
    auto byte = static_cast<unsigned char>(text[i]);
    std::size_t length = byte < 0x80                   ? 1
                         : byte >= 0xc2 && byte < 0xe0 ? 2
                         : byte >= 0xe1 && byte < 0xed ? 3
                                                       : 0;
    bool good = length > 0 && i + length <= bytes && byte >= 0x20 && byte != 0x7f;
    for (std::size_t k = 1; good && k < length; ++k) {
      good = (static_cast<unsigned char>(text[i + k]) & 0xc0) == 0x80;
    }
    if (good) result.append(text.substr(i, length));
    if (!good) result += '?';
    i += good ? length : 1;
  }
  return result;
}

}  // namespace pycollective::tcp
