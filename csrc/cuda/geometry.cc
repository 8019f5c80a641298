#include "cuda/geometry.h"

#include <algorithm>
#include <stdexcept>

#include "cuda/access.h"

namespace pycollective::cuda {
namespace {

// Blocks of a launch per multiprocessor. Several times the blocks that run at once, so that a
// slower multiprocessor gets fewer of them. They are few enough that a block has several tiles of a
// large array.
constexpr std::size_t kBlocksEach = 32;

// Blocks with tiles that run at once on a multiprocessor, limited by their registers.
constexpr std::size_t kResidentEach = 4;

constexpr std::size_t divided_up(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

unsigned bounded(std::size_t blocks, int multiprocessors) {
  std::size_t most = kBlocksEach * static_cast<std::size_t>(multiprocessors);
  return static_cast<unsigned>(std::clamp<std::size_t>(blocks, 1, most));
}

}  // namespace

Cut cut(const Combination& arrays, std::size_t item, std::size_t tile_vectors,
        int multiprocessors) {
  Cut made;
  auto address = [](const void* place) { return reinterpret_cast<std::uintptr_t>(place); };
  // Vectors can be used if all arrays have the same offset from a vector boundary.
  std::uintptr_t first = address(arrays.sources[0]), differences = 0, all = first;
  for (int k = 0; k < arrays.num_sources; ++k) {
    differences |= address(arrays.sources[k]) ^ first;
    all |= address(arrays.sources[k]);
  }
  for (int k = 0; k < arrays.num_targets; ++k) {
    differences |= address(arrays.targets[k]) ^ first;
    all |= address(arrays.targets[k]);
  }
  made.aligned = all % item == 0;
  std::size_t before = (kVectorBytes - first % kVectorBytes) % kVectorBytes;
  if (differences % kVectorBytes || before % item) return made;
  made.head = std::min(arrays.count, before / item);
  made.vectors = (arrays.count - made.head) / (kVectorBytes / item);
  if (tile_vectors) {
    std::size_t tiles = made.vectors / tile_vectors;
    if (tiles >= kResidentEach * static_cast<std::size_t>(multiprocessors)) made.tiles = tiles;
  }
  return made;
}

unsigned blocks_of(const Combination& arrays, std::size_t item, std::size_t tile_vectors,
                   int multiprocessors) {
  const Cut& cut = arrays.cut;
  std::size_t vectors = cut.vectors - cut.tiles * tile_vectors;
  std::size_t single = arrays.count - cut.vectors * (kVectorBytes / item);
  return bounded(std::max({cut.tiles, divided_up(vectors, kThreads), divided_up(single, kThreads)}),
                 multiprocessors);
}

std::vector<Packing> packings(void* packed, const std::vector<device::Piece>& pieces,
                              std::size_t factor, double scale, bool unpacks) {
  std::vector<Packing> all;
  for (const device::Piece& piece : pieces) {
    if (piece.count == 0) continue;
    if (all.empty() || all.back().num_pieces == kPieces) {
      Packing& fresh = all.emplace_back();
      fresh.first_tile[0] = 0;
      fresh.num_pieces = 0;
      fresh.packed = packed;
      fresh.scale = scale;
      fresh.unpacks = unpacks;
    }
    Packing& last = all.back();
    std::size_t count = piece.count * factor;
    std::size_t tiles = last.first_tile[last.num_pieces] + divided_up(count, kTileItems);
    if (tiles > UINT32_MAX) throw std::length_error("the pieces have too many items");
    last.pieces[last.num_pieces] = {piece.address, count, piece.offset * factor};
    last.first_tile[++last.num_pieces] = static_cast<std::uint32_t>(tiles);
  }
  return all;
}

unsigned blocks_of(const Packing& packing, int multiprocessors) {
  return bounded(packing.first_tile[packing.num_pieces], multiprocessors);
}

}  // namespace pycollective::cuda
