// Memory that processes share, behind a file descriptor. On Linux a memfd: nothing has a name,
// nothing is left when the processes are killed, and /dev/shm's size does not matter.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycollective {

// A part of shared memory in this process's addresses; unmapped at the end.
class Mapping {
 public:
  Mapping(std::byte* data, std::size_t size, std::uint64_t begin)
      : data_(data), size_(size), begin_(begin) {}
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  std::uint64_t begin() const { return begin_; }  // its place in the memory
  bool has(const std::byte* address) const { return address >= data_ && address < data_ + size_; }

  // Has the pages of a part of it ready, huge ones if it is large and the system can do that.
  void populate(std::byte* begin, std::size_t bytes) const noexcept;
  // Asks for huge pages, and for core files without this memory; hints, where the system knows
  // them.
  void use_huge_pages() const noexcept;

 private:
  std::byte* data_;
  std::size_t size_;
  std::uint64_t begin_;
};

class SharedMemory {
 public:
  // New memory, all zero. It is sealed: no process can make it shorter, which would end those that
  // touch what is gone. It can grow, which harms nobody. Throws std::system_error.
  static SharedMemory create(std::size_t bytes);
  // The memory behind a descriptor, which is duplicated. Throws std::system_error, also where the
  // memory is not sealed.
  static SharedMemory open(int descriptor);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  int descriptor() const { return descriptor_; }
  std::size_t size() const;
  // Maps a part, whose `begin` is on a page; the memory grows to hold it. Throws
  // std::system_error.
  Mapping map(std::uint64_t begin, std::size_t bytes) const;
  // Makes sure that there is memory for a part, and has its pages ready for a mapping. Throws
  // std::system_error.
  void reserve(Mapping& mapping, std::byte* begin, std::size_t bytes) const;
  // Gives the memory of a part back; what was in it is zero for everyone.
  void discard(const Mapping& mapping, std::byte* begin, std::size_t bytes) const noexcept;
  // From now on nobody else sees what this process writes to a mapped part, on whole pages. It
  // still sees what others write to a page that it has not written to itself. Returns false where
  // there is no memory for that: then the part stays shared.
  bool isolate(const Mapping& mapping, std::byte* begin, std::size_t bytes) const noexcept;
  // Replaces a mapped part, on whole pages, by a copy that only this process sees. Threads of this
  // process may read and write it meanwhile.
  void detach(const Mapping& mapping, std::byte* begin, std::size_t bytes) const noexcept;

 private:
  explicit SharedMemory(int descriptor) : descriptor_(descriptor) {}
  int descriptor_;
};

}  // namespace pycollective
