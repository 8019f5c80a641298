#include "transport/arena.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <set>
#include <stdexcept>

#include "support/lasting.h"
#include "support/round_up.h"
#include "support/tuning.h"

namespace pycollective {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

}  // namespace

// Four size classes per power of two, in steps of at least a cache line, or of a page from 4096
// bytes on.
Arena::Class Arena::class_of(std::size_t bytes) {
  bytes = round_up(std::max(bytes, kCacheLine), kCacheLine);
  const auto octave = static_cast<std::size_t>(std::bit_width(bytes - 1));  // 2^(octave-1) < bytes
  const std::size_t step = std::max(std::size_t{1} << octave >> 3, kCacheLine);
  const std::size_t whole = round_up(bytes, bytes >= kPage ? std::max(step, kPage) : step);
  const std::size_t quarter = (whole - (std::size_t{1} << octave >> 1)) / step;
  return {4 * (octave - 6) + std::min<std::size_t>(quarter ? quarter - 1 : 0, 3), whole};
}

// All arenas of the process.
struct Arena::All {
  std::mutex mutex;  // locked before those of the arenas
  std::set<Arena*> arenas;

  All() {
    // No thread holds the mutex of an arena while the process forks.
    pthread_atfork(
        [] {
          lasting<All>().mutex.lock();
          for (Arena* arena : lasting<All>().arenas) arena->mutex_.lock();
        },
        &All::unlock,
        [] {
          for (Arena* arena : lasting<All>().arenas) arena->isolate();
          unlock();
        });
  }

  static void unlock() {
    for (Arena* arena : lasting<All>().arenas) arena->mutex_.unlock();
    lasting<All>().mutex.unlock();
  }
};

std::shared_ptr<Arena> Arena::map(int descriptor, std::uint64_t begin, std::size_t bytes, int size,
                                  int rank) {
  SharedMemory memory = SharedMemory::open(descriptor);
  Mapping mapping = memory.map(begin, bytes * static_cast<std::size_t>(size));
  mapping.use_huge_pages();
  return std::shared_ptr<Arena>(new Arena(std::move(memory), std::move(mapping), bytes, rank));
}

Arena::Arena(SharedMemory memory, Mapping mapping, std::size_t bytes, int rank)
    : memory_(std::move(memory)),
      mapping_(std::move(mapping)),
      bytes_(bytes),
      base_(mapping_.data() + static_cast<std::size_t>(rank) * bytes) {
  private_.reserve(4);
  All& all = lasting<All>();
  std::lock_guard lock(all.mutex);
  all.arenas.insert(this);
}

Arena::~Arena() {
  All& all = lasting<All>();
  std::lock_guard lock(all.mutex);
  all.arenas.erase(this);
}

Arena* Arena::of(const void* data) noexcept {
  All& all = lasting<All>();
  std::lock_guard lock(all.mutex);
  for (Arena* arena : all.arenas) {
    if (arena->has(static_cast<const std::byte*>(data))) return arena;
  }
  return nullptr;
}

std::byte* Arena::allocate(std::size_t bytes, bool* is_zero) noexcept {
  if (is_zero) *is_zero = false;
  if (!origin_.is_here() || bytes > bytes_) return nullptr;
  const Class found = class_of(bytes);
  std::byte* data = nullptr;
  bool is_new = false;
  try {
    std::lock_guard lock(mutex_);
    auto& free = free_[found.index];
    if (!free.empty()) {
      data = free.back().data;
      if (free.back().is_kept) kept_ -= found.bytes;
      free.pop_back();
    } else {
      const std::size_t unit = found.bytes >= kHugePage ? kHugePage
                               : found.bytes >= kPage   ? kPage
                                                        : kCacheLine;
      const std::size_t at = round_up(used_, unit);
      if (at > bytes_ || bytes_ - at < found.bytes) return nullptr;
      data = base_ + at;
      blocks_.emplace(data, found);
      // free() must not allocate.
      if (blocks_.size() > free.capacity())
        free.reserve(std::max(2 * free.capacity(), std::size_t{8}));
      used_ = at + found.bytes;
      is_new = true;
    }
    if (count_++ == 0) self_ = shared_from_this();
  } catch (const std::exception&) {  // no memory for the lists
    return nullptr;
  }
  if (is_new && found.bytes >= kPopulatedFrom) mapping_.populate(data, found.bytes);
  if (is_zero) *is_zero = is_new;
  return data;
}

void Arena::free(std::byte* data) noexcept {
  if (!origin_.is_here()) return;  // the memory belongs to the parent
  std::shared_ptr<Arena> last;     // destroyed after the mutex is unlocked
  std::lock_guard lock(mutex_);
  auto block = blocks_.find(data);
  if (block == blocks_.end()) return;
  const Class found = block->second;
  const bool has_pages = found.bytes >= kPage;
  const bool is_kept = has_pages && kept_ + found.bytes <= kKeptBytes;
  if (is_kept) {
    kept_ += found.bytes;
  } else if (has_pages) {
    memory_.discard(mapping_, data, found.bytes);
  }
  free_[found.index].push_back({data, is_kept});
  if (--count_ == 0) last.swap(self_);
}

std::size_t Arena::capacity(std::byte* data) const noexcept {
  std::lock_guard lock(mutex_);
  auto block = blocks_.find(data);
  return block == blocks_.end() ? 0 : block->second.bytes;
}

std::uint64_t Arena::handle_of(const void* data, std::size_t bytes) const noexcept {
  auto first = static_cast<const std::byte*>(data);
  if (!has(first) || bytes > bytes_ - static_cast<std::size_t>(first - base_)) return 0;
  if (!origin_.is_here()) return 0;
  if (has_private_.load(std::memory_order_acquire)) {
    std::lock_guard lock(mutex_);
    for (const auto& [begin, end] : private_) {
      if (first < end && begin < first + bytes) return 0;
    }
  }
  return static_cast<std::uint64_t>(first - base_) + 1;
}

std::byte* Arena::address_of(int rank, std::uint64_t handle, std::size_t bytes) const noexcept {
  const auto at = static_cast<std::size_t>(rank) * bytes_;
  if (handle == 0 || handle > bytes_ || bytes > bytes_ - (handle - 1)) return nullptr;
  if (rank < 0 || at + bytes_ > mapping_.size()) return nullptr;
  return mapping_.data() + at + (handle - 1);
}

void Arena::detach(const void* data, std::size_t bytes) noexcept {
  auto first = static_cast<const std::byte*>(data);
  if (!origin_.is_here() || bytes == 0 || !has(first)) return;
  std::lock_guard lock(mutex_);
  const auto offset = static_cast<std::size_t>(first - base_);
  std::byte* begin = base_ + offset / kPage * kPage;
  std::byte* end = base_ + std::min(round_up(offset + bytes, kPage), bytes_);
  try {
    private_.emplace_back(begin, end);
  } catch (const std::exception&) {
    return;  // stays shared: no memory for the list
  }
  has_private_.store(true, std::memory_order_release);
  memory_.detach(mapping_, begin, static_cast<std::size_t>(end - begin));
}

void Arena::isolate() noexcept {
  // This rank's arena only. The program has no arrays in its peers' arenas.
  std::sort(private_.begin(), private_.end());
  std::byte* from = base_;
  auto isolate_to = [&](std::byte* to) {
    if (to > from) memory_.isolate(mapping_, from, static_cast<std::size_t>(to - from));
  };
  for (const auto& [begin, end] : private_) {
    isolate_to(begin);
    from = std::max(from, end);
  }
  isolate_to(base_ + round_up(used_, kPage));
  private_.clear();  // keeps its capacity, so the next line does not allocate
  private_.emplace_back(base_, base_ + bytes_);
}

}  // namespace pycollective
