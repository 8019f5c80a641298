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

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&&) = delete;
  ~SharedMemory();

  // Has the pages of a part of it ready, if the system can do that.
  void populate(std::byte* begin, std::size_t bytes) noexcept;

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  int descriptor() const { return descriptor_; }

 private:
  SharedMemory(int descriptor, std::size_t size);
  int descriptor_;
  std::byte* data_ = nullptr;
  std::size_t size_;
};

}  // namespace pycollective
