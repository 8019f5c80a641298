#include "support/copy.h"

#include <algorithm>
#include <atomic>

#include "support/cores.h"
#include "support/tuning.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace pycollective {
namespace {

#if defined(__x86_64__)

constexpr std::size_t kBlock = 128;

__attribute__((target("avx"))) std::size_t copy_vectors(std::byte* to, const std::byte* from,
                                                        std::size_t bytes) {
  std::size_t done = 0;
  for (; done + kBlock <= bytes; done += kBlock) {
    const auto* source = reinterpret_cast<const __m256i_u*>(from + done);
    auto* target = reinterpret_cast<__m256i_u*>(to + done);
    const __m256i a = _mm256_loadu_si256(source), b = _mm256_loadu_si256(source + 1);
    const __m256i c = _mm256_loadu_si256(source + 2), d = _mm256_loadu_si256(source + 3);
    _mm256_storeu_si256(target, a), _mm256_storeu_si256(target + 1, b);
    _mm256_storeu_si256(target + 2, c), _mm256_storeu_si256(target + 3, d);
  }
  return done;
}

bool has_fast_string_instruction() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kFastShortRepMov = 1U << 4;  // of leaf 7
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kFastShortRepMov);
}

#endif

std::atomic<std::size_t> tuned_past_cache_from{0};

}  // namespace

std::size_t past_cache_setting() { return tuned_past_cache_from.load(std::memory_order_relaxed); }

std::size_t past_cache_from() {
  const std::size_t tuned = past_cache_setting();
  return tuned ? tuned : std::min(last_level_cache(), kMostCacheBytes);
}

void set_past_cache_from(std::size_t bytes) {
  tuned_past_cache_from.store(bytes, std::memory_order_relaxed);
}

void copy_long(std::byte* to, const std::byte* from, std::size_t bytes) {
#if defined(__x86_64__)
  static const bool has_vectors = __builtin_cpu_supports("avx");
  if (has_vectors) {
    std::size_t done = copy_vectors(to, from, bytes);
    to += done, from += done, bytes -= done;
  }
#endif
  std::memcpy(to, from, bytes);
}

void copy_long_to_peer(std::byte* to, const std::byte* from, std::size_t bytes) {
#if defined(__x86_64__)
  static const bool is_fast = has_fast_string_instruction();
  if (is_fast) {
    asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
    return;
  }
#endif
  copy_long(to, from, bytes);
}

}  // namespace pycollective
