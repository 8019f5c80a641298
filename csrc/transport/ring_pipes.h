// Pipes through rings in shared memory, between threads or processes of one host.
//
// A ring holds records, each on its own cache lines. A record is a head; the type and shape, if
// they differ from the record before; and the data. The sender writes the head's kind last, after
// it has cleared the kind of the following record. So the receiver finds the next message, with the
// data of a short one, by polling one cache line.
//
// There are four kinds of messages:
//
// * whole: the record has all data.
// * streamed: the sender writes the head after the first block, and counts further blocks in
//   Ring::written. The receiver copies out while the sender copies in.
// * zero_copy: the data is in the sender's arena, and the record has its handle. The sender waits
//   until the receiver has read it. Very long messages are streamed instead, because two cores copy
//   faster than one.
// * remote: the same for an ordinary array, which the receiver reads through the system
//   (support/peer_memory.h).
//
// The times of messages decide if an ordinary array is read remotely, or copied, and then if it is
// written past the caches. Messages are timed only after each page of the ring was used, because
// the first use of a page costs more than a copy.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/copy.h"
#include "support/wait_queue.h"
#include "transport/pipes.h"

namespace pycollective {

class RingPipes final : public Pipes {
 public:
  static std::size_t bytes_for(int size);
  // `memory` is zero at first, aligned to a cache line, and outlives this object. The pages of two
  // ranks without messages are never touched. `board` maps the handles of arrays; nullptr: no
  // message is zero_copy or remote.
  RingPipes(std::byte* memory, int size, int rank, Board* board);

  bool try_begin(int peer, const Envelope& envelope, const std::byte* data,
                 std::size_t& moved) override;
  std::size_t try_write(int peer, const std::byte* data, std::size_t bytes) override;
  const Envelope* try_next(int peer) override;
  std::size_t try_read(int peer, std::byte* data, std::size_t bytes) override;
  void end(int peer) override;
  void withdraw() noexcept override;
  bool has_ended(int peer) const override {
    return incoming_[static_cast<std::size_t>(peer)].ended;
  }
  SpinLimit spin_limit(bool oversubscribed) const override {
    return memory_spin_limit(oversubscribed);
  }
  std::uint32_t announce_sleep() override { return queue(rank_).announce_sleep(); }
  bool sleep(std::uint32_t seen, Clock::duration limit, const std::vector<Interest>&) override {
    return queue(rank_).sleep(seen, limit);
  }
  void end_sleep() override { queue(rank_).end_sleep(); }
  void wake() noexcept override;

 private:
  enum class Kind : std::uint32_t { none, whole, streamed, zero_copy, remote };
  struct Head;
  struct Description;
  struct Ring;
  // The sender's and the receiver's view of a ring. A position counts all bytes that ever went
  // through the ring.
  struct Outgoing {
    std::uint64_t position = 0;       // The next byte is written here.
    std::uint64_t read = 0;           // The last value of Ring::read that this rank has loaded.
    std::uint64_t identity = 0;       // The hash in the last description.
    std::size_t left = 0;             // Bytes of the current message that are not written yet.
    std::size_t block = 0;            // Bytes of it that are copied in at once.
    std::uint64_t awaited_until = 0;  // The end of a zero-copy or remote record; 0: there is none.
    CopyWay way = CopyWay::plain;     // The way of the current message.
    bool announced = false;           // The receiver knows that this rank sends to it.
  };
  struct Incoming {
    std::uint64_t position = 0;  // The next byte is read here.
    std::uint64_t written = 0;   // The last value of Ring::written that this rank has loaded.
    std::size_t left = 0;        // Bytes of the current message that are not read yet.
    const std::byte* mapped = nullptr;  // A zero-copy message in the sender's arena.
    std::uint64_t remote = 0;           // The address of a remote message.
    CopyWay way = CopyWay::plain;       // The way of its message.
    Clock::time_point since;            // When a timed message began; else zero.
    bool begun = false;
    bool awaited = false;  // This rank has looked for its message before it came.
    bool announced = false;
    bool ended = false;  // The array of its message cannot be read.
    Envelope envelope;
  };

  static std::size_t ring_bytes_of(int size);
  static std::size_t control_bytes(int size);
  Ring& ring(int from, int to) const;
  WaitQueue& queue(int rank) const;
  std::atomic<std::uint64_t>& senders(int to, int from) const;
  // Returns true if each page of a ring was used before this position.
  bool is_used(std::uint64_t position) const { return position >= ring_bytes_; }
  std::byte* at(Ring& ring, std::uint64_t position) const;
  Head& head(Ring& ring, std::uint64_t position) const;
  void copy_in(Ring& ring, std::uint64_t position, const void* data, std::size_t bytes,
               CopyWay way = CopyWay::plain) const;
  void copy_out(Ring& ring, std::uint64_t position, void* data, std::size_t bytes) const;
  std::size_t free_bytes(Ring& to, Outgoing& out, std::size_t wanted) const;

  std::byte* memory_;
  Board* board_;
  int size_, rank_;
  std::size_t ring_bytes_;  // of a ring
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
};

}  // namespace pycollective
