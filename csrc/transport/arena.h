// A rank's memory that all ranks of its host map when they join: Communicator.empty(), results of
// calls, and pycollective.shared_arrays().
//
// The arenas of a group's ranks lie one behind the other in the memory behind one descriptor, and
// every rank maps all of them at once: another rank's array is at base(rank) + offset. Address
// space is all that this costs: a page is there when somebody has touched it. Only the rank that
// owns an arena allocates and frees in it, and needs nobody for it. A forked child owns nothing.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "support/origin.h"
#include "support/shared_memory.h"

namespace pycollective {

class Arena : public std::enable_shared_from_this<Arena> {
 public:
  // Arenas of `bytes` bytes for `size` ranks, from the place `begin` of the memory behind a
  // descriptor on. Throws std::system_error where there is not so much address space.
  static std::shared_ptr<Arena> map(int descriptor, std::uint64_t begin, std::size_t bytes,
                                    int size, int rank);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Memory on a cache line, from a page on on a page; nullptr where the arena is full, and in a
  // forked child. An arena stays as long as something is allocated in it. `is_zero` says whether
  // the memory was never used before.
  std::byte* allocate(std::size_t bytes, bool* is_zero = nullptr) noexcept;
  // Gives back what allocate() has returned; and how many bytes there is room for in it.
  void free(std::byte* data) noexcept;
  std::size_t room(std::byte* data) const noexcept;
  // The arena in which this process may have allocated something; nullptr: in none.
  static Arena* of(const void* data) noexcept;

  // How peers name memory of this rank: 0 where they do not reach it; and where a rank's memory of
  // that name is, nullptr if it has none.
  std::uint64_t place_of(const void* data, std::size_t bytes) const noexcept;
  std::byte* reach(int rank, std::uint64_t place, std::size_t bytes) const noexcept;

  // Replaces this rank's own memory by a copy that peers do not reach, after a failure of a group.
  void detach(const void* data, std::size_t bytes) noexcept;

 private:
  struct All;  // of the process
  using Range = std::pair<std::byte*, std::byte*>;
  static constexpr std::size_t kClasses = 4 * 48;

  Arena(SharedMemory memory, Mapping mapping, std::size_t bytes, int rank);
  // In a forked child: what it writes is not its parent's to see.
  void isolate() noexcept;
  bool has(const std::byte* data) const { return data >= base_ && data < base_ + bytes_; }

  const Origin origin_;
  const SharedMemory memory_;
  const Mapping mapping_;
  const std::size_t bytes_;
  std::byte* const base_;  // of this rank

  mutable std::mutex mutex_;  // guards all below
  std::size_t used_ = 0;      // bytes that were ever allocated
  std::size_t kept_ = 0;      // bytes of pages that are free
  std::size_t count_ = 0;     // allocations that are not freed
  // What memory is cut into: blocks, each of a class of sizes for ever, and the free ones by class.
  struct Class {
    std::size_t index, bytes;
  };
  static Class class_of(std::size_t bytes);
  std::unordered_map<const std::byte*, Class> blocks_;
  std::array<std::vector<std::byte*>, kClasses> free_;
  std::vector<Range> private_;  // parts that are not shared any more
  std::atomic<bool> has_private_{false};
  std::shared_ptr<Arena> self_;  // while something is allocated
};

}  // namespace pycollective
