#include <stdexcept>
#include <utility>

#include "support/shared_memory.h"

// Only Linux has memory without a name that processes can share by descriptor.

namespace pycollective {

SharedMemory SharedMemory::create(std::size_t) {
  throw std::runtime_error("groups of processes through shared memory need Linux");
}

SharedMemory SharedMemory::open(int) { return create(0); }

SharedMemory SharedMemory::part(int, std::size_t, std::size_t) { return create(0); }

SharedMemory::SharedMemory(int descriptor, std::size_t begin, std::size_t size)
    : descriptor_(descriptor), begin_(begin), size_(size) {}

void SharedMemory::populate(std::byte*, std::size_t) noexcept {}
void SharedMemory::reserve(std::byte*, std::size_t) {}
void SharedMemory::discard(std::byte*, std::size_t) const noexcept {}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), begin_(other.begin_), size_(other.size_) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

SharedMemory::~SharedMemory() = default;

}  // namespace pycollective
