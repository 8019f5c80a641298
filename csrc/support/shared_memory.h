// Memory that processes share, behind a file descriptor. On Linux a memfd: nothing has a name,
// nothing is left when the processes are killed, and /dev/shm's size does not matter.
#pragma once

#include <cstddef>

namespace pycollective {

// A mapping of shared memory; unmapped and closed at the end.
class SharedMemory {
 public:
  // New memory, all zero. Throws std::system_error.
  static SharedMemory create(std::size_t bytes);
  // The memory behind a descriptor, which is duplicated. Throws std::system_error.
  static SharedMemory open(int descriptor);

  // A part of the memory behind a descriptor, which is duplicated; the memory grows to hold it.
  // `begin` is on a page. Throws std::system_error.
  static SharedMemory part(int descriptor, std::size_t begin, std::size_t bytes);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  // Has the pages of a part of it ready, if the system can do that.
  void populate(std::byte* begin, std::size_t bytes) noexcept;
  // Makes sure that there is memory for a part of it, for this mapping. Throws std::system_error.
  void reserve(std::byte* begin, std::size_t bytes);
  // Gives the memory of a part of it back; what was in it is zero for everyone.
  void discard(std::byte* begin, std::size_t bytes) const noexcept;

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  int descriptor() const { return descriptor_; }

 private:
  SharedMemory(int descriptor, std::size_t begin, std::size_t size);
  int descriptor_;
  std::size_t begin_;
  std::byte* data_ = nullptr;
  std::size_t size_;
};

}  // namespace pycollective
