#include "executor/direct.h"

#include <algorithm>
#include <cstring>

#include "support/round_up.h"
#include "support/tuning.h"

namespace pycollective {
namespace {

// The next position from which `bytes` bytes lie in one piece in a ring.
std::uint64_t place_in_ring(std::uint64_t position, std::size_t bytes, std::size_t ring) {
  return position % ring + bytes > ring ? round_up(position, ring) : position;
}

std::uint32_t shift_of(const void* address) {
  return static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(address) % kCacheLine);
}

// Bytes of a chunk of a full block: so many that several blocks fit into the staging.
std::size_t full_chunk(int size) {
  std::size_t room = kInputStagingBytes / 4 / static_cast<std::size_t>(size) - kCacheLine;
  return std::min(kStagedChunkBytes, room / kCacheLine * kCacheLine);
}

}  // namespace

DirectAllReduce::DirectAllReduce(Endpoint& endpoint, const DirectCall& call)
    : endpoint_(endpoint),
      board_(*endpoint.board()),
      call_(call),
      bytes_(call.count * call.item),
      turn_(++board_.turn),
      fingerprint_(board_.fingerprint) {
  auto& note = board_.note(board_.rank(), turn_);
  note.fingerprint = fingerprint_;
  auto size = static_cast<std::size_t>(board_.size());
  if (size == 1) {
    mode_ = Mode::alone;
  } else if (bytes_ <= kOneShotBytes && bytes_ * size <= kOneShotTotalBytes) {
    mode_ = Mode::one_shot;
    if (bytes_ <= sizeof note.data) {
      std::memcpy(note.data, call_.input, bytes_);
    } else {
      staging_.input_at = place_in_ring(board_.input_position, bytes_, board_.input_bytes());
      board_.input_position = round_up(staging_.input_at + bytes_, kCacheLine);
      std::memcpy(shot(board_.rank()), call_.input, bytes_);
    }
  } else {
    note.places = {board_.place_of(call_.input, bytes_), board_.place_of(call_.output, bytes_),
                   shift_of(call_.input), shift_of(call_.output)};
    mappable_ = note.places.input && note.places.output;
    if (!mappable_) mode_ = Mode::staged;
    if (mappable_) board_.written = {call_.output, bytes_};
    staging_.input_end = board_.input_position;
    staging_.output_end = board_.output_position;
    lay_out(staging_);
    reducing_ = taking_ = staging_;
  }
  note.turn.store(turn_, std::memory_order_release);
  // Looking at once for what the peers bring would hold up what is still on its way to them.
  if (mode_ == Mode::one_shot && bytes_ > sizeof note.data) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  board_.wake_others();
}

bool DirectAllReduce::all_have_come() {
  for (; come_ < board_.size(); ++come_) {
    if (come_ == board_.rank()) continue;
    const auto& note = board_.note(come_, turn_);
    if (note.turn.load(std::memory_order_acquire) != turn_) return false;
    if (note.fingerprint != fingerprint_) board_.mismatch(come_);
    mappable_ = mappable_ && note.places.input && note.places.output;
  }
  return true;
}

Progress DirectAllReduce::advance() {
  switch (mode_) {
    case Mode::alone: {
      void* target = call_.output;
      const void* source = call_.input;
      combine(&target, 1, &source, bytes_);
      return Progress::done;
    }
    case Mode::one_shot:
      if (!all_have_come()) return Progress::blocked;
      reduce_one_shot();
      return Progress::done;
    case Mode::undecided:
      if (!all_have_come()) return Progress::blocked;
      mode_ = mappable_ ? Mode::mapped : Mode::staged;
      return Progress::moved;
    case Mode::mapped:
      if (reduce_mapped()) mode_ = Mode::mapped_written;
      return Progress::moved;
    case Mode::mapped_written:
      return reached(&Board::Counters::finished, turn_, seen_finished_) ? Progress::done
                                                                        : Progress::blocked;
    case Mode::staged:
      return advance_staged();
  }
  return Progress::blocked;
}

void DirectAllReduce::reduce_one_shot() {
  auto& sources = board_.sources;
  for (int r = 0; r < board_.size(); ++r) {
    const auto& note = board_.note(r, turn_);
    sources[static_cast<std::size_t>(r)] = bytes_ <= sizeof note.data ? note.data : shot(r);
  }
  // A rank's own part is read from its note as well: the output may be the input.
  void* target = call_.output;
  combine(&target, 1, sources.data(), bytes_);
  // What was staged before can be overwritten, when all peers are so far.
  board_.counters(board_.rank()).reduced.store(board_.input_position, std::memory_order_release);
}

std::byte* DirectAllReduce::shot(int rank) const {
  return board_.input_staging(rank) + staging_.input_at % board_.input_bytes();
}

bool DirectAllReduce::reduce_mapped() {
  auto& mine = board_.counters(board_.rank());
  // After a failure peers wait until nobody reaches into their memory, and nobody begins to.
  mine.reaching.store(1);
  struct Reaching {
    std::atomic<std::uint32_t>& flag;
    ~Reaching() { flag.store(0, std::memory_order_release); }
  } reaching{mine.reaching};
  std::atomic_thread_fence(std::memory_order_seq_cst);
  endpoint_.check();
  auto size = static_cast<std::size_t>(board_.size());
  Block whole;
  whole.bytes = bytes_;
  whole.chunk = round_up((bytes_ + size - 1) / size, kCacheLine);
  Span own = chunk_of(whole, board_.rank());
  std::size_t first = own.offset + mapped_, bytes = std::min(own.bytes - mapped_, kPieceBytes);
  for (int r = 0; r < board_.size(); ++r) {
    const auto& places = board_.note(r, turn_).places;
    board_.sources[static_cast<std::size_t>(r)] = board_.reach(r, places.input, bytes_) + first;
    board_.targets[static_cast<std::size_t>(r)] = board_.reach(r, places.output, bytes_) + first;
  }
  combine(board_.targets.data(), size, board_.sources.data(), bytes);
  mapped_ += bytes;
  if (mapped_ < own.bytes) return false;
  // A peer that gave up may have changed what was read here. It fails the group first.
  std::atomic_thread_fence(std::memory_order_acquire);
  endpoint_.check();
  mine.finished.store(turn_, std::memory_order_release);
  board_.wake_others();
  return true;
}

std::vector<int> DirectAllReduce::awaited() const {
  std::vector<int> found;
  for (int r = 0; r < board_.size(); ++r) {
    bool come = board_.note(r, turn_).turn.load(std::memory_order_acquire) == turn_;
    if (r != board_.rank() && !come) found.push_back(r);
  }
  if (!found.empty()) return found;
  if (mode_ == Mode::mapped_written) return behind(&Board::Counters::finished, turn_);
  if (mode_ != Mode::staged) return {};
  // What the blocks under way need next, the earliest one first.
  using Counters = Board::Counters;
  if (reduced_ahead_ > 0) found = behind(&Counters::reduced, taking_.input_end);
  if (found.empty() && reducing_.bytes) found = behind(&Counters::staged, reducing_.input_end);
  if (found.empty() && reducing_.bytes && reducing_.output_end > kOutputStagingBytes) {
    found = behind(&Counters::taken, reducing_.output_end - kOutputStagingBytes);
  }
  if (found.empty() && staging_.bytes && staging_.input_end > kInputStagingBytes) {
    found = behind(&Counters::reduced, staging_.input_end - kInputStagingBytes);
  }
  return found;
}

std::vector<int> DirectAllReduce::behind(std::atomic<std::uint64_t> Board::Counters::* counter,
                                         std::uint64_t position) const {
  std::vector<int> found;
  for (int r = 0; r < board_.size(); ++r) {
    if (r != board_.rank() && (board_.counters(r).*counter).load() < position) found.push_back(r);
  }
  return found;
}

bool DirectAllReduce::reached(std::atomic<std::uint64_t> Board::Counters::* counter,
                              std::uint64_t position, std::uint64_t& seen) const {
  if (seen >= position) return true;
  std::uint64_t least = UINT64_MAX;
  for (int r = 0; r < board_.size(); ++r) {
    if (r == board_.rank()) continue;
    least = std::min(least, (board_.counters(r).*counter).load(std::memory_order_acquire));
    if (least < position) return false;
  }
  seen = least;
  return true;
}

void DirectAllReduce::lay_out(Block& block) const {
  auto size = static_cast<std::size_t>(board_.size());
  std::size_t left = bytes_ - block.begin;
  block.chunk = std::min(full_chunk(board_.size()), round_up((left + size - 1) / size, kCacheLine));
  block.bytes = std::min(left, size * block.chunk);
  block.stride = block.chunk + kCacheLine;         // room for the shift
  std::size_t staged = (size - 1) * block.stride;  // a rank's own chunk is not
  block.input_at = place_in_ring(block.input_end, staged, kInputStagingBytes);
  block.input_end = block.input_at + staged;
  block.output_at = place_in_ring(block.output_end, block.stride, kOutputStagingBytes);
  block.output_end = block.output_at + block.stride;
}

void DirectAllReduce::go_on(Block& block) const {
  block.begin += block.bytes;
  block.bytes = 0;
  if (block.begin < bytes_) lay_out(block);
}

DirectAllReduce::Span DirectAllReduce::chunk_of(const Block& block, int rank) const {
  std::size_t begin = std::min(static_cast<std::size_t>(rank) * block.chunk, block.bytes);
  std::size_t end = std::min(begin + block.chunk, block.bytes);
  return {block.begin + begin, end - begin};
}

Progress DirectAllReduce::advance_staged() {
  Progress progress = Progress::blocked;
  std::size_t until = taking_.begin + kPieceBytes;
  while (taking_.bytes) {
    if (taking_.begin >= until) return Progress::moved;
    bool moved = try_stage();
    moved = try_reduce() || moved;
    moved = try_take() || moved;
    if (!moved) return progress;
    progress = Progress::moved;
  }
  board_.input_position = taking_.input_end;
  board_.output_position = taking_.output_end;
  return Progress::done;
}

// Where in a block's staging of a rank the chunk for another one lies.
std::size_t DirectAllReduce::staged_place(int rank, int peer, const Block& block) {
  return static_cast<std::size_t>(peer < rank ? peer : peer - 1) * block.stride;
}

bool DirectAllReduce::try_stage() {
  if (!staging_.bytes || staged_ahead_ > board_.lookahead()) return false;
  if (staging_.input_end > kInputStagingBytes &&
      !reached(&Board::Counters::reduced, staging_.input_end - kInputStagingBytes, seen_reduced_)) {
    return false;
  }
  std::byte* staging = board_.input_staging(board_.rank()) +
                       staging_.input_at % kInputStagingBytes + shift_of(call_.input);
  for (int i = 1; i < board_.size(); ++i) {
    int peer = (board_.rank() + i) % board_.size();
    Span chunk = chunk_of(staging_, peer);
    if (!chunk.bytes) continue;
    std::memcpy(staging + staged_place(board_.rank(), peer, staging_), call_.input + chunk.offset,
                chunk.bytes);
  }
  board_.counters(board_.rank()).staged.store(staging_.input_end, std::memory_order_release);
  board_.wake_others();
  ++staged_ahead_;
  go_on(staging_);
  return true;
}

bool DirectAllReduce::try_reduce() {
  if (staged_ahead_ == 0 || !all_have_come() ||
      !reached(&Board::Counters::staged, reducing_.input_end, seen_staged_)) {
    return false;
  }
  if (reducing_.output_end > kOutputStagingBytes &&
      !reached(&Board::Counters::taken, reducing_.output_end - kOutputStagingBytes, seen_taken_)) {
    return false;
  }
  int rank = board_.rank();
  Span own = chunk_of(reducing_, rank);
  std::size_t place = reducing_.input_at % kInputStagingBytes;
  for (int r = 0; r < board_.size(); ++r) {
    board_.sources[static_cast<std::size_t>(r)] =
        r == rank ? call_.input + own.offset
                  : board_.input_staging(r) + place + staged_place(r, rank, reducing_) +
                        board_.note(r, turn_).places.input_shift;
  }
  void* targets[] = {call_.output + own.offset, board_.output_staging(rank) +
                                                    reducing_.output_at % kOutputStagingBytes +
                                                    shift_of(call_.output)};
  combine(targets, 2, board_.sources.data(), own.bytes);
  board_.counters(rank).reduced.store(reducing_.input_end, std::memory_order_release);
  board_.wake_others();
  --staged_ahead_;
  ++reduced_ahead_;
  go_on(reducing_);
  return true;
}

bool DirectAllReduce::try_take() {
  // A block that has just been reduced is left alone for a while: the peers are at it too.
  bool due = reducing_.bytes ? reduced_ahead_ > board_.lookahead() : reduced_ahead_ > 0;
  if (!due || !reached(&Board::Counters::reduced, taking_.input_end, seen_reduced_)) return false;
  std::size_t place = taking_.output_at % kOutputStagingBytes;
  for (int i = 1; i < board_.size(); ++i) {
    int peer = (board_.rank() + i) % board_.size();
    Span chunk = chunk_of(taking_, peer);
    if (!chunk.bytes) continue;
    std::memcpy(call_.output + chunk.offset,
                board_.output_staging(peer) + place + board_.note(peer, turn_).places.output_shift,
                chunk.bytes);
  }
  board_.counters(board_.rank()).taken.store(taking_.output_end, std::memory_order_release);
  board_.wake_others();
  --reduced_ahead_;
  go_on(taking_);
  return true;
}

void DirectAllReduce::combine(void* const* targets, std::size_t num_targets,
                              const void* const* sources, std::size_t bytes) const {
  combine_all(call_, targets, num_targets, sources, board_.size(), bytes / call_.item);
}

void combine_all(const DirectCall& call, void* const* targets, std::size_t num_targets,
                 const void* const* sources, int size, std::size_t count) {
  if (count == 0) return;
  const Reduction& reduction = *call.reduction;
  bool fused = !reduction.half || call.fused;
  if (num_targets == 1 && size == 2 && (!reduction.half || !fused)) {
    reduction.combine(targets[0], sources[0], sources[1], count);
    if (reduction.finish) reduction.finish(targets[0], count, size);
    return;
  }
  if (fused) {
    combine_many(call.dtype, call.op, targets, num_targets, sources, static_cast<std::size_t>(size),
                 count, size);
    return;
  }
  // Halves, rounded after each step, by blocks: a target may be one of the sources.
  alignas(kCacheLine) std::byte block[kReduceBlockBytes];
  std::size_t items = sizeof block / call.item;
  for (std::size_t first = 0; first < count; first += items) {
    std::size_t length = std::min(items, count - first), offset = first * call.item;
    auto source = [&](int r) { return static_cast<const std::byte*>(sources[r]) + offset; };
    std::memcpy(block, source(0), length * call.item);
    for (int r = 1; r < size; ++r) reduction.combine(block, block, source(r), length);
    if (reduction.finish) reduction.finish(block, length, size);
    for (std::size_t t = 0; t < num_targets; ++t) {
      std::memcpy(static_cast<std::byte*>(targets[t]) + offset, block, length * call.item);
    }
  }
}

}  // namespace pycollective
