// Memory that processes share through a file descriptor. On Linux it is a memfd, which has no name,
// and which the size of /dev/shm does not limit. The memory disappears with the processes even if
// they are killed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycollective {

// A part of shared memory, mapped into this process until the destructor unmaps it.
class Mapping {
 public:
  Mapping(std::byte* data, std::size_t size, std::uint64_t begin)
      : data_(data), size_(size), begin_(begin) {}
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  std::uint64_t begin() const { return begin_; }  // offset in the memory
  bool has(const std::byte* address) const { return address >= data_ && address < data_ + size_; }

  // Allocates the pages of a part, as huge pages if the part is large and the system supports that.
  void populate(std::byte* begin, std::size_t bytes) const noexcept;
  // Requests huge pages, and core files without this memory. Only hints: some systems ignore them.
  void use_huge_pages() const noexcept;

 private:
  std::byte* data_;
  std::size_t size_;
  std::uint64_t begin_;
};

class SharedMemory {
 public:
  // Creates memory filled with zeros. A seal forbids every process to shrink it: accesses to the
  // removed part would kill the other processes. Growing stays allowed. Throws std::system_error.
  static SharedMemory create(std::size_t bytes);
  // Duplicates a descriptor of shared memory. Throws std::system_error, also if the memory is not
  // sealed.
  static SharedMemory open(int descriptor);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  int descriptor() const { return descriptor_; }
  std::size_t size() const;
  // Maps a part, and grows the memory if necessary. `begin` must be a multiple of the page size.
  // Throws std::system_error.
  Mapping map(std::uint64_t begin, std::size_t bytes) const;
  // Reserves memory for a part and allocates the pages of a mapping. Throws std::system_error.
  void reserve(Mapping& mapping, std::byte* begin, std::size_t bytes) const;
  // Frees the memory of a part. Every process then reads zeros there.
  void discard(const Mapping& mapping, std::byte* begin, std::size_t bytes) const noexcept;
  // Makes this process's writes to a mapped part (whole pages) private. Until this process writes
  // to a page, it still sees the writes of others there. Returns false, and the part stays shared,
  // if there is not enough memory.
  bool isolate(const Mapping& mapping, std::byte* begin, std::size_t bytes) const noexcept;
  // Replaces a mapped part (whole pages) by a private copy. Other threads of this process may read
  // and write it meanwhile.
  void detach(const Mapping& mapping, std::byte* begin, std::size_t bytes) const noexcept;

 private:
  explicit SharedMemory(int descriptor) : descriptor_(descriptor) {}
  int descriptor_;
};

}  // namespace pycollective
