// Ordinary memory of another process of this host, read through the system: one copy, where a way
// through shared memory takes two.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycollective {

// The number of this process. A process may have another one in another container.
std::int32_t process_number();

// A process, and a secret at a place in its memory. Without it a reader would take the memory of
// another process that has got the number.
struct PeerMemory {
  std::int32_t process;
  std::uint64_t secret_at;
  std::uint64_t secret;
};

// Reads bytes of a process and its secret, in one system call. Returns false if the system does not
// allow it, or if there is no such memory.
bool read_peer(const PeerMemory& peer, std::uint64_t from, std::byte* to, std::size_t bytes);

}  // namespace pycollective
