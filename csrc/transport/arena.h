// The arena: a rank's heap in shared memory, for Communicator.empty(), the results of calls, and
// pycollective.shared_arrays().
//
// All arenas of a host are adjacent in one shared-memory file. Every rank maps all of them when it
// joins, so a peer's array is at base(rank) + offset. This needs address space only: the system
// allocates a page at its first use. Only its owner allocates and frees in an arena, so both are
// local operations. A forked child owns no arena.
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
  // Maps the arenas of `size` ranks, `bytes` bytes each, from offset `begin` of a shared-memory
  // file. Throws std::system_error if the address space does not suffice.
  static std::shared_ptr<Arena> map(int descriptor, std::uint64_t begin, std::size_t bytes,
                                    int size, int rank);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Returns memory that is aligned to a cache line, or to a page from 4096 bytes on. Returns
  // nullptr if the arena is full, or in a forked child. The arena stays alive while it has
  // allocations. `is_zero` becomes true if the memory was never used before.
  std::byte* allocate(std::size_t bytes, bool* is_zero = nullptr) noexcept;
  // Frees memory of allocate(). capacity() returns its usable bytes.
  void free(std::byte* data) noexcept;
  std::size_t capacity(std::byte* data) const noexcept;
  // Returns this process's arena that contains an address; nullptr if there is none.
  static Arena* of(const void* data) noexcept;

  // Returns a handle with which peers find memory of this rank; 0 if it is not in the arena.
  // address_of() maps a rank's handle to an address here; nullptr if the handle is invalid.
  std::uint64_t handle_of(const void* data, std::size_t bytes) const noexcept;
  std::byte* address_of(int rank, std::uint64_t handle, std::size_t bytes) const noexcept;

  // Replaces memory of this rank by a private copy, so that no peer can write to it.
  void detach(const void* data, std::size_t bytes) noexcept;

 private:
  struct All;  // all arenas of the process
  using Range = std::pair<std::byte*, std::byte*>;
  static constexpr std::size_t kClasses = 4 * 48;

  Arena(SharedMemory memory, Mapping mapping, std::size_t bytes, int rank);
  // In a forked child: makes the memory private, so that the parent does not see the child's
  // writes.
  void isolate() noexcept;
  bool has(const std::byte* data) const { return data >= base_ && data < base_ + bytes_; }

  const Origin origin_;
  const SharedMemory memory_;
  const Mapping mapping_;
  const std::size_t bytes_;
  std::byte* const base_;  // of this rank's arena

  mutable std::mutex mutex_;  // guards the members below
  std::size_t used_ = 0;      // bytes in blocks, allocated and free
  std::size_t kept_ = 0;      // bytes of free blocks that keep their pages
  std::size_t count_ = 0;     // allocations
  // The arena is divided into blocks. The size class of a block never changes.
  struct Class {
    std::size_t index, bytes;
  };
  static Class class_of(std::size_t bytes);
  std::unordered_map<const std::byte*, Class> blocks_;
  struct Free {
    std::byte* data;
    bool is_kept;  // its pages count in kept_
  };
  std::array<std::vector<Free>, kClasses> free_;
  std::vector<Range> private_;  // ranges that are not shared any more
  std::atomic<bool> has_private_{false};
  std::shared_ptr<Arena> self_;  // keeps the arena alive while it has allocations
};

}  // namespace pycollective
