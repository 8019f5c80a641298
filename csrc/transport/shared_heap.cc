#include "transport/shared_heap.h"

#include <pthread.h>

#include <algorithm>
#include <set>
#include <utility>

#include "support/lasting.h"
#include "support/round_up.h"
#include "support/tuning.h"

namespace pycollective {
namespace {

constexpr std::size_t kPage = 4096;

}  // namespace

struct SharedHeap::Forks {
  std::mutex mutex;  // locked before those of the heaps
  std::set<SharedHeap*> heaps;

  Forks() {
    // While a process forks, no heap is in the middle of something.
    pthread_atfork(
        [] {
          lasting<Forks>().mutex.lock();
          for (SharedHeap* heap : lasting<Forks>().heaps) heap->mutex_.lock();
        },
        &Forks::go_on,
        [] {
          for (SharedHeap* heap : lasting<Forks>().heaps) heap->isolate();
          go_on();
        });
  }

  static void go_on() {
    for (SharedHeap* heap : lasting<Forks>().heaps) heap->mutex_.unlock();
    lasting<Forks>().mutex.unlock();
  }
};

SharedHeap::SharedHeap(int descriptor, std::uint64_t begin, int size, int rank)
    : memory_(SharedMemory::open(descriptor)), end_(begin), size_(size), rank_(rank) {
  Forks& forks = lasting<Forks>();
  std::lock_guard lock(forks.mutex);
  forks.heaps.insert(this);
}

SharedHeap::~SharedHeap() {
  Forks& forks = lasting<Forks>();
  std::lock_guard lock(forks.mutex);
  forks.heaps.erase(this);
}

void SharedHeap::isolate() noexcept {
  for (Region& region : regions_) {
    std::byte* data = region.memory.data();
    std::size_t size = region.memory.size();
    memory_.isolate(region.memory, data, region.private_begin);
    memory_.isolate(region.memory, data + region.private_end, size - region.private_end);
    region.private_begin = 0;
    region.private_end = size;
  }
}

std::byte* SharedHeap::allocate(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  forget_released();
  std::size_t needed = round_up(std::max<std::size_t>(bytes, 1), kCacheLine);
  bool is_short = needed <= kHeapBlockBytes / 2;
  if (is_short && open_ && open_->used + needed <= open_->part) return take(*open_, needed);

  // All ranks do this alike, also one that then finds no memory.
  if (is_short) open_ = nullptr;
  std::uint64_t begin = end_;
  std::size_t part = is_short ? kHeapBlockBytes : round_up(needed, kPage);
  std::size_t whole = kPage + part * static_cast<std::size_t>(size_);
  end_ += whole;
  Region region{memory_.map(begin, whole), part};
  memory_.reserve(region.memory,
                  region.memory.data() + kPage + part * static_cast<std::size_t>(rank_), part);
  regions_.push_back(std::move(region));
  if (is_short) open_ = &regions_.back();
  return take(regions_.back(), needed);
}

std::byte* SharedHeap::take(Region& region, std::size_t bytes) {
  std::byte* own =
      region.memory.data() + kPage + region.part * static_cast<std::size_t>(rank_) + region.used;
  region.used += bytes;
  ++region.arrays;
  return own;
}

// Only an allocation that makes a region can fail, on any rank.
void SharedHeap::take_back(std::byte* part) noexcept {
  std::lock_guard lock(mutex_);
  Region* region = find(part);
  if (!region || region->arrays != 1) return;
  memory_.discard(region->memory, region->memory.data(), region->memory.size());
  if (region == open_) open_ = nullptr;
  regions_.remove_if([region](const Region& other) { return &other == region; });
}

void SharedHeap::release(std::byte* part) noexcept {
  if (!origin_.is_here()) return;
  std::lock_guard lock(mutex_);
  Region* region = find(part);
  if (!region || !is_over(*region, counts(*region).released.fetch_add(1) + 1)) return;
  // The page with the counts stays: others have still to read it.
  memory_.discard(region->memory, region->memory.data() + kPage, region->memory.size() - kPage);
}

// Whether no rank has an array in it any more, and none will be made.
bool SharedHeap::is_over(const Region& region, std::uint32_t released) const {
  return &region != open_ && released == region.arrays * static_cast<std::uint32_t>(size_);
}

void SharedHeap::forget_released() {
  regions_.remove_if([this](const Region& region) {
    if (!is_over(region, counts(region).released.load())) return false;
    if (counts(region).forgotten.fetch_add(1) + 1 == static_cast<std::uint32_t>(size_)) {
      memory_.discard(region.memory, region.memory.data(), region.memory.size());
    }
    return true;
  });
}

void SharedHeap::detach(const void* data, std::size_t bytes) noexcept {
  if (!origin_.is_here()) return;
  std::lock_guard lock(mutex_);
  Region* region = find(data);
  if (!region || bytes == 0) return;
  std::byte* base = region->memory.data();
  auto first = static_cast<std::size_t>(static_cast<const std::byte*>(data) - base);
  std::size_t end = std::min(round_up(first + bytes, kPage), region->memory.size());
  first = first / kPage * kPage;
  memory_.detach(region->memory, base + first, end - first);
  region->private_begin = first;  // a group fails once, in one call
  region->private_end = end;
}

SharedHeap::Region* SharedHeap::find(const void* address) {
  for (Region& region : regions_) {
    if (region.memory.has(static_cast<const std::byte*>(address))) return &region;
  }
  return nullptr;
}

std::uint64_t SharedHeap::place_of(const void* data, std::size_t bytes) {
  std::lock_guard lock(mutex_);
  const Region* region = find(data);
  if (!region) return 0;
  auto first =
      static_cast<std::size_t>(static_cast<const std::byte*>(data) - region->memory.data());
  return bytes <= region->memory.size() - first ? region->memory.begin() + first : 0;
}

std::byte* SharedHeap::reach(std::uint64_t place, std::size_t bytes) {
  std::lock_guard lock(mutex_);
  for (const Region& region : regions_) {
    std::uint64_t begin = region.memory.begin(), size = region.memory.size();
    if (place < begin || place - begin >= size) continue;
    return bytes <= size - (place - begin) ? region.memory.data() + (place - begin) : nullptr;
  }
  return nullptr;
}

}  // namespace pycollective
