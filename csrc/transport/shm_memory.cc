#include "transport/shm_memory.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "support/round_up.h"
#include "transport/board.h"
#include "transport/ring_pipes.h"

namespace pycollective {
namespace {

constexpr std::uint64_t kMagic = 0x6576697463656c6f;  // "olective"
constexpr std::uint32_t kVersion = 13;
constexpr std::size_t kPage = 4096;
constexpr int kMaxRanks = 1024;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kMaxArenas = std::size_t{1} << 45;  // of the 2^47 bytes that a process has

}  // namespace

ShmMemory::Layout::Layout(int ranks_of_group) : size(ranks_of_group) {
  const auto n = static_cast<std::size_t>(size);
  ranks = round_up(sizeof(ShmHeader), kPage);
  channels = ranks + round_up(n * sizeof(ShmRank), kPage);
  rings = channels + round_up(n * n * sizeof(ShmChannel), kPage);
  // Whole pages, so that a part has whole items.
  slot_bytes =
      std::clamp(kShmRingsBytes / (n * n * kShmSlots) / kPage * kPage, kPage, kShmSlotBytes);
  board = rings + n * n * kShmSlots * slot_bytes;
  pipes = board + Board::bytes_for(size, /*with_staging=*/true);
  end = pipes + round_up(RingPipes::bytes_for(size), kPage);
  arenas = round_up(end, kHugePage);
}

std::uint64_t ShmMemory::Layout::bytes_with_arenas(std::size_t arena) const {
  return arenas + std::uint64_t{arena} * static_cast<std::uint64_t>(size);
}

ShmMemory::ShmMemory(SharedMemory memory, const Layout& begin, std::size_t arena_bytes)
    : memory_(std::move(memory)),
      begin_(begin),
      mapping_(memory_.map(0, begin.end)),
      arena_bytes_(arena_bytes) {}

ShmMemory ShmMemory::create(int size, std::size_t arena) {
  if (size < 1 || size > kMaxRanks) {
    throw std::invalid_argument("a group of processes has 1 to " + std::to_string(kMaxRanks) +
                                " ranks, not " + std::to_string(size));
  }
  const Layout layout(size);
  arena = std::min(arena, kMaxArenas / static_cast<std::size_t>(size)) / kHugePage * kHugePage;
  SharedMemory shared = [&] {
    try {
      return SharedMemory::create(layout.bytes_with_arenas(arena));
    } catch (const std::system_error&) {  // a limit for the length of files
      arena = 0;
      return SharedMemory::create(layout.bytes_with_arenas(0));
    }
  }();
  ShmMemory memory(std::move(shared), layout, arena);
  auto* header = new (memory.at(0)) ShmHeader;
  header->version = kVersion;
  header->size = size;
  header->bytes = layout.end;
  header->arena = arena;
  header->failed.store(0);
  header->magic = kMagic;
  return memory;
}

ShmMemory ShmMemory::open(int descriptor) {
  auto refuse = [descriptor] {
    throw std::invalid_argument(
        "descriptor " + std::to_string(descriptor) +
        " is not the shared memory of a group of this version of pycollective");
  };
  SharedMemory memory = SharedMemory::open(descriptor);
  const std::size_t bytes = memory.size();
  if (bytes < sizeof(ShmHeader)) refuse();
  const Mapping first = memory.map(0, round_up(sizeof(ShmHeader), kPage));
  const auto* header = reinterpret_cast<const ShmHeader*>(first.data());
  // Local copies: another process may change the header after the checks.
  const int size = header->size;
  const std::uint64_t arena = header->arena;
  if (header->magic != kMagic || header->version != kVersion || size < 1 || size > kMaxRanks) {
    refuse();
  }
  const Layout layout(size);
  if (header->bytes != layout.end || arena > kMaxArenas / static_cast<std::size_t>(size) ||
      bytes != layout.bytes_with_arenas(arena)) {
    refuse();
  }
  return ShmMemory(std::move(memory), layout, arena);
}

void ShmMemory::populate_board() const {
  const std::size_t bytes = begin_.pipes - begin_.board;
  if (bytes <= kPopulatedBytes) mapping_.populate(board(), bytes);
}

}  // namespace pycollective
