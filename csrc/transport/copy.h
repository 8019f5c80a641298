// Copies of bytes that do not overlap.
#pragma once

#include <cstddef>
#include <cstring>

namespace pycollective {

// Through the processor's widest vectors. The C library moves some KiB with one instruction, which
// is slow on processors where source and target lie differently within their pages.
void copy_long(std::byte* to, const std::byte* from, std::size_t bytes);

inline void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  constexpr std::size_t kLong = 2048;
  if (bytes >= kLong) {
    copy_long(to, from, bytes);
  } else if (bytes > 0) {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace pycollective
