#include "transport/ring_pipes.h"

#include <algorithm>
#include <cstring>

#include "support/copy.h"
#include "support/round_up.h"
#include "support/tuning.h"
#include "transport/board.h"

namespace pycollective {
namespace {

constexpr std::size_t kPage = 4096;

}  // namespace

// `kind` is written last and read first.
struct RingPipes::Head {
  std::atomic<Kind> kind;
  std::int32_t tag;
  std::uint64_t bytes;
  std::uint64_t identity;
  std::uint16_t described;  // 1 if a Description follows
  CopyWay way;
  std::uint32_t began;  // short_time() of a long message
};

struct RingPipes::Description {
  std::int64_t shape[Envelope::kMaxDims];
  char type[sizeof Envelope::type];
  std::int32_t dims;
};

struct alignas(kCacheLine) RingPipes::Ring {
  // The sender has written all bytes of a streamed message before this position.
  std::atomic<std::uint64_t> written;
  // 1: the sender has given up, and the receiver must drop data of its arrays.
  std::atomic<std::uint32_t> withdrawn;
  // The receiver has read all bytes before this position.
  alignas(kCacheLine) std::atomic<std::uint64_t> read;
  alignas(kCacheLine) std::byte data[1];
};

std::size_t RingPipes::ring_bytes_of(int size) {
  auto n = static_cast<std::size_t>(size);
  std::size_t bytes = kPipesBytes / (n * n) / kPage * kPage;
  return std::clamp(bytes, kLeastPipeBytes, kMostPipeBytes);
}

std::size_t RingPipes::control_bytes(int size) {
  auto n = static_cast<std::size_t>(size);
  return round_up(n * sizeof(WaitQueue), kPage) +
         round_up(n * round_up((n + 63) / 64 * 8, kCacheLine), kPage);
}

std::size_t RingPipes::bytes_for(int size) {
  auto n = static_cast<std::size_t>(size);
  return control_bytes(size) + n * n * (ring_bytes_of(size) + kPage);
}

RingPipes::RingPipes(std::byte* memory, int size, int rank, Board* board)
    : memory_(memory),
      board_(board),
      size_(size),
      rank_(rank),
      ring_bytes_(ring_bytes_of(size)),
      outgoing_(static_cast<std::size_t>(size)),
      incoming_(static_cast<std::size_t>(size)) {
  queue(rank).prepare();
}

WaitQueue& RingPipes::queue(int rank) const { return reinterpret_cast<WaitQueue*>(memory_)[rank]; }

// A bit for each rank that has sent messages to rank `to`. Other rings are not polled.
std::atomic<std::uint64_t>& RingPipes::senders(int to, int from) const {
  auto n = static_cast<std::size_t>(size_);
  std::byte* begin = memory_ + round_up(n * sizeof(WaitQueue), kPage) +
                     static_cast<std::size_t>(to) * round_up((n + 63) / 64 * 8, kCacheLine);
  return reinterpret_cast<std::atomic<std::uint64_t>*>(begin)[from / 64];
}

RingPipes::Ring& RingPipes::ring(int from, int to) const {
  auto n = static_cast<std::size_t>(size_);
  std::size_t index = static_cast<std::size_t>(from) * n + static_cast<std::size_t>(to);
  return *reinterpret_cast<Ring*>(memory_ + control_bytes(size_) + index * (ring_bytes_ + kPage));
}

std::byte* RingPipes::at(Ring& ring, std::uint64_t position) const {
  return ring.data + position % ring_bytes_;
}

RingPipes::Head& RingPipes::head(Ring& ring, std::uint64_t position) const {
  return *reinterpret_cast<Head*>(at(ring, position));
}

void RingPipes::copy_in(Ring& ring, std::uint64_t position, const void* data, std::size_t bytes,
                        CopyWay way) const {
  const auto* from = static_cast<const std::byte*>(data);
  const auto copy = way == CopyWay::past_cache ? copy_past_cache : copy_to_peer;
  std::size_t first = std::min(bytes, ring_bytes_ - position % ring_bytes_);
  copy(at(ring, position), from, first);
  if (first < bytes) copy(ring.data, from + first, bytes - first);
}

void RingPipes::copy_out(Ring& ring, std::uint64_t position, void* data, std::size_t bytes) const {
  auto* to = static_cast<std::byte*>(data);
  std::size_t first = std::min(bytes, ring_bytes_ - position % ring_bytes_);
  copy_bytes(to, at(ring, position), first);
  if (first < bytes) copy_bytes(to + first, ring.data, bytes - first);
}

// Returns how many of `wanted` bytes fit. Reserves a cache line for the head of the next record.
std::size_t RingPipes::free_bytes(Ring& to, Outgoing& out, std::size_t wanted) const {
  auto found = [&] {
    std::uint64_t used = out.position - out.read + kCacheLine;
    return used > ring_bytes_ ? 0 : static_cast<std::size_t>(ring_bytes_ - used);
  };
  if (found() < wanted) out.read = to.read.load(std::memory_order_acquire);
  return std::min(found(), wanted);
}

bool RingPipes::try_begin(int peer, const Envelope& envelope, const std::byte* data,
                          std::size_t& moved) {
  Ring& to = ring(rank_, peer);
  Outgoing& out = outgoing_[static_cast<std::size_t>(peer)];
  const bool described = envelope.identity != out.identity;
  const std::size_t ahead = sizeof(Head) + (described ? sizeof(Description) : 0);
  const bool may_be_zero_copy =
      board_ && envelope.bytes >= kZeroCopyBytes && envelope.bytes <= kMostZeroCopyBytes;
  std::uint64_t place = may_be_zero_copy ? board_->handle_of(data, envelope.bytes) : 0;
  Kind kind = place                           ? Kind::zero_copy
              : envelope.bytes <= kWholeBytes ? Kind::whole
                                              : Kind::streamed;
  const std::size_t most = ahead + (kind == Kind::whole ? envelope.bytes : sizeof place);
  if (free_bytes(to, out, round_up(most, kCacheLine)) < round_up(most, kCacheLine)) return false;
  std::uint32_t began = 0;
  out.way = CopyWay::plain;
  const bool is_copied = board_ && kind != Kind::zero_copy;
  if (is_copied && envelope.bytes >= kCopyTrialBytes && is_used(out.position)) {
    began = short_time(Clock::now());
    out.way = board_->begin_long_message(peer, envelope.bytes);
    if (out.way == CopyWay::remote_read) {
      place = board_->remote_address(data);
      kind = place ? Kind::remote : kind;
      out.way = place ? out.way : CopyWay::plain;
    }
  }
  const bool awaits = kind == Kind::zero_copy || kind == Kind::remote;
  const std::size_t inline_bytes = awaits ? sizeof place : kind == Kind::whole ? envelope.bytes : 0;
  const std::size_t length = round_up(ahead + inline_bytes, kCacheLine);
  if (!out.announced) {
    senders(peer, rank_).fetch_or(std::uint64_t{1} << (rank_ % 64));
    out.announced = true;
  }
  const std::uint64_t begin = out.position;
  Head& first = head(to, begin);
  first.tag = envelope.tag;
  first.bytes = envelope.bytes;
  first.identity = envelope.identity;
  first.described = described;
  first.way = out.way;
  first.began = began;
  if (described) {
    Description description;
    std::copy_n(envelope.shape, Envelope::kMaxDims, description.shape);
    std::memcpy(description.type, envelope.type, sizeof description.type);
    description.dims = envelope.dims;
    copy_in(to, begin + sizeof(Head), &description, sizeof description);
    out.identity = envelope.identity;
  }
  out.position = begin + length;
  if (kind == Kind::streamed) {
    out.left = envelope.bytes;
    out.block = std::min(pipe_block_bytes(envelope.bytes), ring_bytes_ / 4);
    moved = try_write(peer, data, envelope.bytes);
  } else {
    copy_in(to, begin + ahead, awaits ? static_cast<const void*>(&place) : data, inline_bytes,
            out.way);
    head(to, out.position).kind.store(Kind::none, std::memory_order_relaxed);
    out.awaited_until = awaits ? out.position : 0;
    moved = awaits ? 0 : envelope.bytes;
  }
  first.kind.store(kind, std::memory_order_release);
  queue(peer).wake_if_asleep();
  return true;
}

std::size_t RingPipes::try_write(int peer, const std::byte* data, std::size_t bytes) {
  Ring& to = ring(rank_, peer);
  Outgoing& out = outgoing_[static_cast<std::size_t>(peer)];
  if (out.awaited_until) {
    if (to.read.load(std::memory_order_acquire) < out.awaited_until) return 0;
    out.awaited_until = 0;
    return bytes;
  }
  std::size_t count = std::min(bytes, out.block);
  count = std::min(count, free_bytes(to, out, round_up(count, kCacheLine)));
  if (count == out.left) {
    // After the last piece, the next head begins with a cache line, which must be free too.
    const std::uint64_t padded = round_up(out.position + count, kCacheLine) - out.position;
    if (free_bytes(to, out, padded) < padded) count -= std::min(count, kCacheLine);
  }
  if (count == 0) return 0;
  copy_in(to, out.position, data, count, out.way);
  out.left -= count;
  out.position += count;
  if (out.left == 0) {
    out.position = round_up(out.position, kCacheLine);
    head(to, out.position).kind.store(Kind::none, std::memory_order_relaxed);
  }
  to.written.store(out.position, std::memory_order_release);
  queue(peer).wake_if_asleep();
  return count;
}

const Envelope* RingPipes::try_next(int peer) {
  Incoming& in = incoming_[static_cast<std::size_t>(peer)];
  if (in.begun) return &in.envelope;
  if (!in.announced) {
    std::uint64_t all = senders(rank_, peer).load(std::memory_order_acquire);
    if ((all >> (peer % 64) & 1) == 0) return nullptr;
    in.announced = true;
  }
  Ring& from = ring(peer, rank_);
  const Head& first = head(from, in.position);
  const Kind kind = first.kind.load(std::memory_order_acquire);
  if (kind == Kind::none) {
    in.awaited = true;
    return nullptr;
  }
  Envelope& envelope = in.envelope;
  const bool known = kind <= Kind::remote;
  envelope.magic = known ? Envelope::kMagic : 0;
  envelope.tag = first.tag;
  envelope.bytes = first.bytes;
  envelope.identity = first.identity;
  std::size_t ahead = sizeof(Head);
  if (first.described) {
    Description description;
    copy_out(from, in.position + ahead, &description, sizeof description);
    std::copy_n(description.shape, Envelope::kMaxDims, envelope.shape);
    std::memcpy(envelope.type, description.type, sizeof envelope.type);
    envelope.dims = description.dims;
    ahead += sizeof description;
  }
  const bool is_timed = envelope.bytes >= kCopyTrialBytes && is_used(in.position);
  in.way = first.way;
  in.since = is_timed ? Clock::now() : Clock::time_point();
  // The time of a message that this rank awaited begins with its sender's first copy.
  if (is_timed && in.awaited) in.since = std::min(in.since, time_near(in.since, first.began));
  in.position += ahead;
  in.left = envelope.bytes;
  in.written = in.position;
  in.mapped = nullptr;
  in.remote = 0;
  if (kind == Kind::whole) {
    in.written += in.left;
  } else if ((kind == Kind::zero_copy || kind == Kind::remote) && board_) {
    std::uint64_t place = 0;
    copy_out(from, in.position, &place, sizeof place);
    if (kind == Kind::remote) {
      in.remote = place;
    } else {
      in.mapped = board_->address_of(peer, place, envelope.bytes);
      in.ended = !in.mapped;
    }
    in.position += sizeof place;
  } else {
    in.position = round_up(in.position, kCacheLine);
  }
  in.begun = true;
  return &envelope;
}

std::size_t RingPipes::try_read(int peer, std::byte* data, std::size_t bytes) {
  Ring& from = ring(peer, rank_);
  Incoming& in = incoming_[static_cast<std::size_t>(peer)];
  if (in.ended) return 0;
  if (in.mapped || in.remote) {
    // A sender that gives up sets `withdrawn` before it uses the memory again.
    const std::size_t count = std::min({bytes, in.left, kMappedChunkBytes});
    const std::size_t done = in.envelope.bytes - in.left;
    if (in.remote) {
      in.ended = !board_->read_remote(peer, in.remote + done, data, count);
      if (in.ended) return 0;
    } else {
      copy_bytes(data, in.mapped + done, count);
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    if (from.withdrawn.load(std::memory_order_relaxed)) return 0;
    in.left -= count;
    return count;
  }
  if (in.written <= in.position) in.written = from.written.load(std::memory_order_acquire);
  if (in.written <= in.position) return 0;
  std::size_t there = static_cast<std::size_t>(in.written - in.position);
  std::size_t count = std::min({bytes, in.left, there, pipe_block_bytes(in.envelope.bytes)});
  copy_out(from, in.position, data, count);
  in.position += count;
  in.left -= count;
  if (in.left > 0) {
    from.read.store(in.position, std::memory_order_release);
    queue(peer).wake_if_asleep();
  }
  return count;
}

void RingPipes::end(int peer) {
  Ring& from = ring(peer, rank_);
  Incoming& in = incoming_[static_cast<std::size_t>(peer)];
  in.position = round_up(in.position, kCacheLine);
  in.begun = in.awaited = false;
  if (board_ && !in.mapped && in.since != Clock::time_point()) {
    board_->end_long_message(in.envelope.bytes, in.way, in.since);
  }
  from.read.store(in.position, std::memory_order_release);
  queue(peer).wake_if_asleep();
}

void RingPipes::withdraw() noexcept {
  for (int peer = 0; peer < size_; ++peer) {
    if (outgoing_[static_cast<std::size_t>(peer)].awaited_until)
      ring(rank_, peer).withdrawn.store(1);
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void RingPipes::wake() noexcept { queue(rank_).wake_if_asleep(); }

}  // namespace pycollective
