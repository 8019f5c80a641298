// Copies of bytes that do not overlap.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace pycollective {

// For a target that no other core has in its caches. Uses vectors on processors that have them. The
// string instruction, which the C library may choose, is slow on some processors if source and
// target have different offsets within their pages.
void copy_long(std::byte* to, const std::byte* from, std::size_t bytes);

// For a target that another core has read. Uses the string instruction if the processor has a fast
// one. The instruction acquires the other core's cache lines without reading them first, as vector
// stores do.
void copy_long_to_peer(std::byte* to, const std::byte* from, std::size_t bytes);

// The ways of an ordinary array to another process. `plain` and `past_cache` are copies through
// shared memory, with plain stores or past the caches. `remote_read` is a read through the system
// (support/peer_memory.h).
enum class CopyWay : std::uint16_t { plain, past_cache, remote_read };
inline constexpr int kCopyWays = 3;

inline constexpr std::size_t kLongCopy = 2048;

inline void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes >= kLongCopy) {
    copy_long(to, from, bytes);
  } else if (bytes > 0) {
    std::memcpy(to, from, bytes);
  }
}

inline void copy_to_peer(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes >= kLongCopy) {
    copy_long_to_peer(to, from, bytes);
  } else if (bytes > 0) {
    std::memcpy(to, from, bytes);
  }
}

// Calls whose arrays (of all ranks together) have at least this many bytes may copy past the
// caches. They do if `bench --tune` has set the value. Otherwise the value is the size of the
// last-level cache, at most kMostCacheBytes, and the calls try both ways (StoreTrials).
std::size_t past_cache_from();
void set_past_cache_from(std::size_t bytes);  // 0: the default
// Returns the value that set_past_cache_from() has set; 0: none.
std::size_t past_cache_setting();

// For a target that is not read soon. The copy evicts nothing from the caches and does not read the
// target's lines first. As with memcpy, other threads see the copy before anything that this thread
// writes afterwards.
inline void copy_past_cache(std::byte* to, const std::byte* from, std::size_t bytes) {
#if defined(__SSE2__)
  constexpr std::size_t kLine = 64;
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
  std::memcpy(to, from, bytes);
#endif
}

}  // namespace pycollective
