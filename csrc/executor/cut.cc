#include "executor/cut.h"

#include <algorithm>

#include "schedule/collective.h"
#include "support/round_up.h"

namespace pycollective {
namespace {

std::size_t items_of_block(int chunks, const Layout& layout, std::size_t segment_bytes) {
  if (layout.pairwise) return layout.count;
  std::size_t segment = std::max(segment_bytes / layout.item, kCacheLine);
  return layout.input_parts ? segment : segment * static_cast<std::size_t>(chunks);
}

}  // namespace

Cut::Cut(const Plan& plan, const Layout& layout, std::size_t segment_bytes)
    : layout_(layout),
      chunks_(plan.chunks),
      block_items_(items_of_block(plan.chunks, layout, segment_bytes)) {
  next_block();
}

void Cut::next_block() {
  begin_ = end_;
  std::size_t items = std::min(block_items_, layout_.count - begin_);
  end_ = begin_ + items;
  // Chunks begin at cache lines, so that two ranks never write to the same line.
  std::size_t aligned = std::max<std::size_t>(kCacheLine / layout_.item, 1);
  auto chunks = layout_.input_parts ? 1 : static_cast<std::size_t>(chunks_);
  chunk_items_ = round_up((items + chunks - 1) / chunks, aligned);
}

std::size_t Cut::bytes_of(const Span& span) const {
  if (!layout_.input_parts || span.buffer == Buffer::scratch || span.count < 2) {
    return locate(span).count;
  }
  std::size_t sum = 0;
  for (int i = 0; i < span.count; ++i) sum += locate_part(span, i).count;
  return sum;
}

Cut::Bytes Cut::locate(const Span& span, std::size_t skipped) const {
  if (span.count == 0) return {0, 0};
  std::size_t item = layout_.item, items = end_ - begin_;
  auto first = static_cast<std::size_t>(span.first), count = static_cast<std::size_t>(span.count);
  if (!layout_.input_parts) {
    std::size_t offset = first * chunk_items_;
    if (span.buffer == Buffer::scratch) {
      first %= static_cast<std::size_t>(chunks_);
    } else {
      offset = std::min(offset, items) + begin_;
    }
    std::size_t begin = std::min(first * chunk_items_, items);
    std::size_t end = std::min((first + count) * chunk_items_, items);
    return {offset * item + skipped, (end - begin) * item - skipped};
  }
  if (span.buffer == Buffer::scratch) {
    return {first * items * item + skipped, count * items * item - skipped};
  }
  Bytes found = locate_part(span, 0);
  int i = 1;
  for (; skipped >= found.count && i < span.count; ++i) {
    skipped -= found.count;
    found = locate_part(span, i);
  }
  found.offset += skipped;
  found.count -= skipped;
  // Joins parts that are adjacent in memory.
  for (; i < span.count; ++i) {
    Bytes next = locate_part(span, i);
    if (next.count > 0 && next.offset != found.offset + found.count) break;
    found.count += next.count;
  }
  return found;
}

Cut::Bytes Cut::locate_part(const Span& span, int i) const {
  const Part* parts = span.buffer == Buffer::input ? layout_.input_parts : layout_.output_parts;
  const Part& part = parts[static_cast<std::size_t>(index_of_part(span.first + i, layout_.size))];
  std::size_t begin = std::min(begin_, part.count), end = std::min(end_, part.count);
  return {(part.first + begin) * layout_.item, (end - begin) * layout_.item};
}

}  // namespace pycollective
