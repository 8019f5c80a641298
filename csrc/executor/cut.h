// Cuts the data of a call into chunks: finds the bytes of the spans of a plan's steps. Hosts and
// devices (device/executor.h) cut alike, so that their sums have the same bits.
//
// The data are run through in blocks: a block is a segment of every chunk, or of every part.
#pragma once

#include <cstddef>

#include "schedule/step.h"
#include "support/tuning.h"

namespace pycollective {

// The place of a chunk that is a rank's part, in items.
struct Part {
  std::size_t first = 0;
  std::size_t count = 0;
};

// The data of a call, in items of `item` bytes. Without parts, input and output have `count` items,
// which are cut into equal chunks. With them, chunk i is where part i says, and `count` is the
// longest part's.
struct Layout {
  std::size_t count = 0;
  std::size_t item = 1;
  int size = 1;  // ranks
  const Part* input_parts = nullptr;
  const Part* output_parts = nullptr;
  // A part's length is known to its sender and its receiver only: the call is one block, and empty
  // parts are sent too.
  bool pairwise = false;
};

class Cut {
 public:
  // In bytes: where something begins in its buffer, and how long it is.
  struct Bytes {
    std::size_t offset, count;
  };

  // Begins with the first block, which is the longest.
  Cut(const Plan& plan, const Layout& layout, std::size_t segment_bytes = kSegmentBytes);
  bool is_last() const { return end_ == layout_.count; }
  void next_block();

  // The bytes of a chunk in this block. The last chunks may be shorter.
  std::size_t chunk_bytes() const { return chunk_items_ * layout_.item; }
  std::size_t bytes_of(const Span& span) const;
  // A span from byte `skipped` on, as far as it lies in one piece.
  Bytes locate(const Span& span, std::size_t skipped = 0) const;

 private:
  Bytes locate_part(const Span& span, int i) const;

  const Layout layout_;
  const int chunks_;
  const std::size_t block_items_;    // of a full block; with parts, of one part
  std::size_t begin_ = 0, end_ = 0;  // items of the block; with parts, of every part
  std::size_t chunk_items_ = 0;
};

}  // namespace pycollective
