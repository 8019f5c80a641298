#include "transport/shared_heap.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <system_error>
#include <utility>

namespace pycollective {
namespace {

constexpr std::size_t kPage = 4096;

std::atomic<std::uint32_t>& released(const SharedMemory& memory) {
  return *reinterpret_cast<std::atomic<std::uint32_t>*>(memory.data());
}

}  // namespace

SharedHeap::SharedHeap(int descriptor, std::uint64_t begin, int size, int rank)
    : root_(SharedMemory::part(descriptor, 0, kPage)), end_(begin), size_(size), rank_(rank) {}

std::byte* SharedHeap::allocate(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  forget_released();
  std::size_t part = std::max(kPage, (bytes + kPage - 1) / kPage * kPage);
  std::uint64_t begin = end_;
  std::size_t whole = kPage + part * static_cast<std::size_t>(size_);
  end_ += whole;
  try {
    SharedMemory memory = SharedMemory::part(root_.descriptor(), begin, whole);
    std::byte* own = memory.data() + kPage + part * static_cast<std::size_t>(rank_);
    memory.reserve(own, part);
    regions_.push_back({begin, std::move(memory)});
    return own;
  } catch (const std::system_error&) {
    throw std::bad_alloc();
  }
}

void SharedHeap::take_back(std::byte* part) noexcept {
  std::lock_guard lock(mutex_);
  std::erase_if(regions_, [part](const Region& region) {
    const SharedMemory& memory = region.memory;
    bool here = part >= memory.data() && part < memory.data() + memory.size();
    if (here) memory.discard(memory.data(), memory.size());
    return here;
  });
}

void SharedHeap::release(std::byte* part) noexcept {
  std::lock_guard lock(mutex_);
  for (const Region& region : regions_) {
    if (part < region.memory.data() || part >= region.memory.data() + region.memory.size()) {
      continue;
    }
    if (released(region.memory).fetch_add(1) + 1 < static_cast<std::uint32_t>(size_)) return;
    // The page that says so stays: others have still to read it.
    region.memory.discard(region.memory.data() + kPage, region.memory.size() - kPage);
    return;
  }
}

void SharedHeap::forget_released() {
  std::erase_if(regions_, [this](const Region& region) {
    return released(region.memory).load() == static_cast<std::uint32_t>(size_);
  });
}

std::uint64_t SharedHeap::place_of(const void* data, std::size_t bytes) {
  const auto* at = static_cast<const std::byte*>(data);
  std::lock_guard lock(mutex_);
  for (const Region& region : regions_) {
    const std::byte* first = region.memory.data();
    if (at >= first && at + bytes <= first + region.memory.size()) {
      return region.begin + static_cast<std::uint64_t>(at - first);
    }
  }
  return 0;
}

std::byte* SharedHeap::reach(std::uint64_t place) {
  std::lock_guard lock(mutex_);
  for (const Region& region : regions_) {
    if (place >= region.begin && place - region.begin < region.memory.size()) {
      return region.memory.data() + (place - region.begin);
    }
  }
  return nullptr;
}

}  // namespace pycollective
