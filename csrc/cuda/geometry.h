// Divides the work of a launch among threads, with wide memory accesses. Plain C++, tested without
// a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/runtime.h"

namespace pycollective::cuda {

// A division of the items of arrays: `head` single items, `vectors` of 16 bytes, then single items.
// Whole blocks process the first vectors, in `tiles`.
struct Cut {
  std::size_t head = 0, vectors = 0, tiles = 0;
  // False if single items are not aligned; then they are accessed byte by byte.
  bool aligned = true;
};

// The argument of combine_as() in combine.h.
struct Combination {
  const void* sources[device::kMaxArrays];
  void* targets[device::kMaxArrays];
  int num_sources, num_targets;
  std::size_t count;
  int size;  // the divisor of a mean, or 0
  Cut cut;
};

// Divides arrays of items of `item` bytes. A tile has `tile_vectors` vectors; 0 means no tiles. A
// short array has no tiles either, because a few tiles would occupy too few threads.
Cut cut(const Combination& arrays, std::size_t item, std::size_t tile_vectors, int multiprocessors);

// The number of blocks for a division.
unsigned blocks_of(const Combination& arrays, std::size_t item, std::size_t tile_vectors,
                   int multiprocessors);

// Pieces per launch. Their table is a kernel argument, whose size is limited to 4 KiB.
inline constexpr int kPieces = 128;

// Items that a block packs at once.
inline constexpr unsigned kTileItems = 4096;

struct Packing {
  struct Part {
    void* address;
    std::size_t count, offset;  // items
  };
  Part pieces[kPieces];
  std::uint32_t first_tile[kPieces + 1];  // by piece; the last entry is the number of tiles
  int num_pieces;
  void* packed;
  double scale;
  bool unpacks;
};

// Distributes pieces over launches. An item counts as `factor` items.
std::vector<Packing> packings(void* packed, const std::vector<device::Piece>& pieces,
                              std::size_t factor, double scale, bool unpacks);

unsigned blocks_of(const Packing& packing, int multiprocessors);

}  // namespace pycollective::cuda
