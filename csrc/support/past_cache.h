// Copies whose target is not read soon: they leave what is in the caches there, and do not read the
// target's lines first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace pycollective {

// As memcpy. What follows in this thread is seen by others after the copy, as with memcpy.
inline void copy_past_cache(void* target, const void* source, std::size_t bytes) {
#if defined(__SSE2__)
  constexpr std::size_t kLine = 64;
  auto* to = static_cast<std::byte*>(target);
  auto* from = static_cast<const std::byte*>(source);
  const std::size_t head =
      std::min(bytes, (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine);
  if (head) std::memcpy(to, from, head);
  std::size_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    auto* line = reinterpret_cast<__m128i*>(to + at);
    auto* read = reinterpret_cast<const __m128i*>(from + at);
    const __m128i a = _mm_loadu_si128(read), b = _mm_loadu_si128(read + 1);
    const __m128i c = _mm_loadu_si128(read + 2), d = _mm_loadu_si128(read + 3);
    _mm_stream_si128(line, a);
    _mm_stream_si128(line + 1, b);
    _mm_stream_si128(line + 2, c);
    _mm_stream_si128(line + 3, d);
  }
  _mm_sfence();
  if (at < bytes) std::memcpy(to + at, from + at, bytes - at);
#else
  std::memcpy(target, source, bytes);
#endif
}

}  // namespace pycollective
