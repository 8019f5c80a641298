#include <stdexcept>
#include <utility>

#include "support/shared_memory.h"

// Only Linux has unnamed memory that processes share by descriptor.

namespace pycollective {

Mapping::Mapping(Mapping&& other) noexcept = default;
Mapping& Mapping::operator=(Mapping&& other) noexcept = default;
Mapping::~Mapping() = default;
void Mapping::use_huge_pages() const noexcept {}

void Mapping::populate(std::byte*, std::size_t) const noexcept {}

SharedMemory SharedMemory::create(std::size_t) {
  throw std::runtime_error("groups of processes through shared memory need Linux");
}
SharedMemory SharedMemory::open(int) { return create(0); }

std::size_t SharedMemory::size() const { return 0; }
Mapping SharedMemory::map(std::uint64_t begin, std::size_t bytes) const {
  return Mapping(nullptr, bytes, begin);
}
void SharedMemory::reserve(Mapping&, std::byte*, std::size_t) const {}
void SharedMemory::discard(const Mapping&, std::byte*, std::size_t) const noexcept {}
bool SharedMemory::isolate(const Mapping&, std::byte*, std::size_t) const noexcept { return false; }
void SharedMemory::detach(const Mapping&, std::byte*, std::size_t) const noexcept {}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

SharedMemory::~SharedMemory() = default;

}  // namespace pycollective
