// Arrays that all ranks of a host reach: Communicator.empty().
//
// The memory lies behind the group's own descriptor, after the group's. All ranks allocate in the
// same order, so that each knows where the others' parts are without being told; places are never
// used again, but the memory behind them is given back when every rank has released its part. Short
// arrays share a region, since each region costs every rank a mapping.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>

#include "support/origin.h"
#include "support/shared_memory.h"

namespace pycollective {

class SharedHeap {
 public:
  // Begins at the place `begin` of the memory behind a descriptor.
  SharedHeap(int descriptor, std::uint64_t begin, int size, int rank);
  ~SharedHeap();
  SharedHeap(const SharedHeap&) = delete;
  SharedHeap& operator=(const SharedHeap&) = delete;

  // This rank's part of so many bytes, on a cache line; the other ranks get theirs by the same
  // call. Throws std::system_error where there is not so much memory.
  std::byte* allocate(std::size_t bytes);
  // A forked child releases nothing: the arrays are its parent's.
  void release(std::byte* part) noexcept;
  // Undoes the last allocate(), because another rank's has thrown.
  void take_back(std::byte* part) noexcept;

  // Replaces this rank's own memory by a copy that peers do not reach, after a failure of the
  // group.
  void detach(const void* data, std::size_t bytes) noexcept;

  // How other ranks name memory in here: 0, if it is not; and what a name means, nullptr if
  // nothing.
  std::uint64_t place_of(const void* data, std::size_t bytes);
  std::byte* reach(std::uint64_t place, std::size_t bytes);

 private:
  // Begins with a page of its own, behind which the ranks' parts lie.
  struct Region {
    Mapping memory;
    std::size_t part;  // bytes of each rank's
    std::size_t used = 0;
    std::uint32_t arrays = 0;  // that every rank has made in it
    // The part of it that is not shared any more.
    std::size_t private_begin = 0, private_end = 0;
  };
  // In a region's first page: how often ranks have released an array of it, and how many ranks have
  // forgotten it.
  struct Counts {
    std::atomic<std::uint32_t> released, forgotten;
  };
  static Counts& counts(const Region& region) {
    return *reinterpret_cast<Counts*>(region.memory.data());
  }
  Region* find(const void* address);
  bool is_over(const Region& region, std::uint32_t released) const;
  std::byte* take(Region& region, std::size_t bytes);
  void forget_released();

  // What happens to all heaps of the process when it forks.
  struct Forks;
  // In a forked child: what it writes is not its parent's to see.
  void isolate() noexcept;

  const Origin origin_;
  std::mutex mutex_;  // guards all below
  SharedMemory memory_;
  std::uint64_t end_;
  int size_, rank_;
  std::list<Region> regions_;
  Region* open_ = nullptr;  // the region in which short arrays are made
};

}  // namespace pycollective
