// Reads ordinary memory of another process of this host (process_vm_readv on Linux). This needs one
// copy; shared memory needs two.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycollective {

// Returns the id of this process. Other containers may see another id.
std::int32_t process_number();

// A process, with the address and value of a secret in its memory. The secret detects another
// process with the same id.
struct PeerMemory {
  std::int32_t process;
  std::uint64_t secret_at;
  std::uint64_t secret;
};

// Reads bytes of a process and checks the secret, in one system call. Returns false if the system
// refuses, or if the memory does not exist.
bool read_peer(const PeerMemory& peer, std::uint64_t from, std::byte* to, std::size_t bytes);

}  // namespace pycollective
