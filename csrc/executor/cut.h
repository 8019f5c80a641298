// Cuts the data of a call into blocks and chunks, and maps the spans of a plan's steps to bytes.
//
// A block is a segment of every chunk, or of every part. Hosts and devices (device/executor.h) use
// the same cuts, so that their sums have the same bits.
#pragma once

#include <cstddef>

#include "schedule/step.h"
#include "support/tuning.h"

namespace pycollective {

// One rank's part of an array, in items.
struct Part {
  std::size_t first = 0;
  std::size_t count = 0;
};

// The lengths of a call's data, in items of `item` bytes. Without parts, input and output have
// `count` items, cut into equal chunks. With parts, chunk i is part i, and `count` is the length of
// the longest part.
struct Layout {
  std::size_t count = 0;
  std::size_t item = 1;
  int size = 1;  // ranks
  const Part* input_parts = nullptr;
  const Part* output_parts = nullptr;
  // True if only a part's sender and its receiver know its length. Then the call is one block, and
  // empty parts are sent too.
  bool pairwise = false;
};

class Cut {
 public:
  // Bytes of a buffer.
  struct Bytes {
    std::size_t offset, count;
  };

  // Begins at the first block, which is the longest.
  Cut(const Plan& plan, const Layout& layout, std::size_t segment_bytes = kSegmentBytes);
  bool is_last() const { return end_ == layout_.count; }
  void next_block();

  // Bytes of a chunk of this block. The last chunks may be shorter.
  std::size_t chunk_bytes() const { return chunk_items_ * layout_.item; }
  std::size_t bytes_of(const Span& span) const;
  // Returns the contiguous bytes of a span from byte `skipped` on.
  Bytes locate(const Span& span, std::size_t skipped = 0) const;

 private:
  Bytes locate_part(const Span& span, int i) const;

  const Layout layout_;
  const int chunks_;
  const std::size_t block_items_;    // items of a full block; with parts, of a part
  std::size_t begin_ = 0, end_ = 0;  // items of the present block; with parts, in every part
  std::size_t chunk_items_ = 0;
};

}  // namespace pycollective
