#include <stdexcept>
#include <utility>

#include "support/shared_memory.h"

// Only Linux has memory without a name that processes can share by descriptor.

namespace pycollective {

SharedMemory SharedMemory::create(std::size_t) {
  throw std::runtime_error("groups of processes through shared memory need Linux");
}

SharedMemory SharedMemory::open(int) { return create(0); }

SharedMemory::SharedMemory(int descriptor, std::size_t size)
    : descriptor_(descriptor), size_(size) {}

void SharedMemory::populate(std::byte*, std::size_t) noexcept {}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), size_(other.size_) {}

SharedMemory::~SharedMemory() = default;

}  // namespace pycollective
