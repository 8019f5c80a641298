// How the work of a launch is cut, so that its accesses are wide and its threads enough. Plain
// C++, which is tested without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/runtime.h"

namespace pycollective::cuda {

// Items of arrays that are combined: `head` single ones, `vectors` of 16 bytes, and single ones to
// the end. The first vectors are taken by whole blocks at once, `tiles` times.
struct Cut {
  std::size_t head = 0, vectors = 0, tiles = 0;
  // Whether single items are aligned; where not, they move byte by byte.
  bool aligned = true;
};

// What combine_as() of combine.h is given.
struct Combination {
  const void* sources[device::kMaxArrays];
  void* targets[device::kMaxArrays];
  int num_sources, num_targets;
  std::size_t count;
  int size;  // what a mean divides by, or 0
  Cut cut;
};

// Cuts arrays of items of `item` bytes. A tile has `tile_vectors`, or there is none where that is
// 0; tiles leave fewer threads with more to do each, so few of them are none.
Cut cut(const Combination& arrays, std::size_t item, std::size_t tile_vectors, int multiprocessors);

// How many blocks run what was cut.
unsigned blocks_of(const Combination& arrays, std::size_t item, std::size_t tile_vectors,
                   int multiprocessors);

// Pieces that go with one launch: their table is its argument, of which there are at most 4 KiB.
inline constexpr int kPieces = 128;

// Items that a block packs at once.
inline constexpr unsigned kTileItems = 4096;

struct Packing {
  struct Part {
    void* place;
    std::size_t count, offset;  // items
  };
  Part pieces[kPieces];
  std::uint32_t first_tile[kPieces + 1];  // of each piece, and behind the last
  int num_pieces;
  void* packed;
  double scale;
  bool unpacks;
};

// Shares out pieces, of which each item counts as `factor`, over launches.
std::vector<Packing> packings(void* packed, const std::vector<device::Piece>& pieces,
                              std::size_t factor, double scale, bool unpacks);

unsigned blocks_of(const Packing& packing, int multiprocessors);

}  // namespace pycollective::cuda
