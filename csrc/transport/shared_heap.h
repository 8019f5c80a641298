// Arrays that all ranks of a host reach: Communicator.empty().
//
// The memory lies behind the group's own descriptor, after the group's. All ranks allocate in the
// same order, so that each knows where the others' parts are without being told; places are never
// used again, but the memory behind them is given back when every rank has released its part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "support/shared_memory.h"

namespace pycollective {

class SharedHeap {
 public:
  // Begins at the place `begin` of the memory behind a descriptor.
  SharedHeap(int descriptor, std::uint64_t begin, int size, int rank);

  // This rank's part of so many bytes, on a page; the other ranks get theirs by the same call.
  // Throws std::bad_alloc where there is not so much memory.
  std::byte* allocate(std::size_t bytes);
  void release(std::byte* part) noexcept;
  // Undoes allocate(), where all ranks do.
  void take_back(std::byte* part) noexcept;

  // How other ranks name memory in here: 0, if it is not; and what a name means.
  std::uint64_t place_of(const void* data, std::size_t bytes);
  std::byte* reach(std::uint64_t place);

 private:
  struct Region {
    std::uint64_t begin;
    SharedMemory memory;  // a page for itself, then the ranks' parts
  };
  void forget_released();

  std::mutex mutex_;  // guards all below
  SharedMemory root_;
  std::uint64_t end_;
  int size_, rank_;
  std::vector<Region> regions_;
};

}  // namespace pycollective
