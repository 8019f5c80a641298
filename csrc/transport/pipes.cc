#include "transport/pipes.h"

#include <algorithm>
#include <cstring>

#include "support/futex.h"
#include "support/tuning.h"

namespace pycollective {

struct alignas(kCacheLine) RingPipes::Sleeper {
  std::atomic<std::uint32_t> wake_ups;
  std::atomic<std::uint32_t> asleep;  // threads of the rank that listen
};

struct alignas(kCacheLine) RingPipes::Ring {
  std::atomic<std::uint64_t> written;  // bytes, ever
  alignas(kCacheLine) std::atomic<std::uint64_t> read;
  std::byte* data() { return reinterpret_cast<std::byte*>(this + 1); }
};

std::size_t RingPipes::ring_bytes(int size) {
  auto n = static_cast<std::size_t>(size);
  std::size_t room = kPipesBytes / (n * n) / kCacheLine * kCacheLine;
  return std::clamp(room, kLeastPipeBytes, kMostPipeBytes);
}

std::size_t RingPipes::bytes_for(int size) {
  auto n = static_cast<std::size_t>(size);
  return n * sizeof(Sleeper) + n * n * (sizeof(Ring) + ring_bytes(size));
}

RingPipes::RingPipes(std::byte* memory, int size, int rank)
    : memory_(memory), size_(size), rank_(rank), room_(ring_bytes(size)) {}

RingPipes::Sleeper& RingPipes::sleeper(int rank) const {
  return reinterpret_cast<Sleeper*>(memory_)[rank];
}

RingPipes::Ring& RingPipes::ring(int from, int to) const {
  auto n = static_cast<std::size_t>(size_);
  std::size_t place = static_cast<std::size_t>(from) * n + static_cast<std::size_t>(to);
  return *reinterpret_cast<Ring*>(memory_ + n * sizeof(Sleeper) + place * (sizeof(Ring) + room_));
}

std::size_t RingPipes::try_write(int peer, const std::byte* data, std::size_t bytes) {
  Ring& to = ring(rank_, peer);
  std::uint64_t written = to.written.load(std::memory_order_relaxed);
  std::uint64_t used = written - to.read.load(std::memory_order_acquire);
  if (used > room_) return 0;  // memory that is not what it should be
  std::size_t count = std::min<std::size_t>(bytes, room_ - used);
  if (count == 0) return 0;
  std::size_t place = written % room_, first = std::min(count, room_ - place);
  std::memcpy(to.data() + place, data, first);
  std::memcpy(to.data(), data + first, count - first);
  to.written.store(written + count, std::memory_order_release);
  wake_if_asleep(peer);
  return count;
}

std::size_t RingPipes::try_read(int peer, std::byte* data, std::size_t bytes) {
  Ring& from = ring(peer, rank_);
  std::uint64_t read = from.read.load(std::memory_order_relaxed);
  std::uint64_t there = from.written.load(std::memory_order_acquire) - read;
  std::size_t count = std::min<std::size_t>(bytes, std::min<std::uint64_t>(there, room_));
  if (count == 0) return 0;
  std::size_t place = read % room_, first = std::min(count, room_ - place);
  std::memcpy(data, from.data() + place, first);
  std::memcpy(data + first, from.data(), count - first);
  from.read.store(read + count, std::memory_order_release);
  wake_if_asleep(peer);
  return count;
}

void RingPipes::wake_if_asleep(int rank) const {
  // Pairs with the fence in listen(): either we see the sleeper, or it sees what we have done.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  Sleeper& other = sleeper(rank);
  if (other.asleep.load(std::memory_order_relaxed) == 0) return;
  other.wake_ups.fetch_add(1);
  futex_wake_all(other.wake_ups);
}

std::uint32_t RingPipes::listen() {
  Sleeper& me = sleeper(rank_);
  std::uint32_t heard = me.wake_ups.load();
  me.asleep.fetch_add(1);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return heard;
}

void RingPipes::sleep(std::uint32_t heard, std::chrono::milliseconds limit,
                      const std::vector<Interest>&) {
  Sleeper& me = sleeper(rank_);
  if (limit.count() > 0) futex_wait(me.wake_ups, heard, limit);
  me.asleep.fetch_sub(1);
}

void RingPipes::wake() noexcept { wake_if_asleep(rank_); }

}  // namespace pycollective
