// Pipes that are rings in memory that all ranks reach: between threads, or processes of one host.
//
// A ring holds records, each on cache lines of its own: a head, the description of type and shape
// where they are not those of the record before, and the data. The sender writes the head's kind
// last, after it has cleared that of the record to come: so the receiver finds the next message by
// one look at one cache line, which has a short message's data too. A longer message is announced
// when its first block is there; a counter says how far the rest has come, so that the receiver
// copies out while the sender still copies in. A message that lies where the receiver reaches it
// is not copied in at all, if it is long but not very long: the record says where it is, and the
// sender waits for its reader.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/wait_queue.h"
#include "transport/pipes.h"

namespace pycollective {

class RingPipes final : public Pipes {
 public:
  static std::size_t bytes_for(int size);
  // `memory` begins as zeros, on a cache line, and stays as long as this. A page of it that belongs
  // to two ranks which never send each other anything is never touched. `board` finds memory that
  // peers reach; nullptr: no message is read where it lies.
  RingPipes(std::byte* memory, int size, int rank, Board* board);

  bool try_begin(int peer, const Envelope& envelope, const std::byte* data,
                 std::size_t& moved) override;
  std::size_t try_write(int peer, const std::byte* data, std::size_t bytes) override;
  const Envelope* try_next(int peer) override;
  std::size_t try_read(int peer, std::byte* data, std::size_t bytes) override;
  void end(int peer) override;
  void withdraw() noexcept override;
  SpinLimit spin_limit(bool crowd) const override { return memory_spin_limit(crowd); }
  std::uint32_t announce_sleep() override { return queue(rank_).announce_sleep(); }
  bool sleep(std::uint32_t seen, Clock::duration limit, const std::vector<Interest>&) override {
    return queue(rank_).sleep(seen, limit);
  }
  void end_sleep() override { queue(rank_).end_sleep(); }
  void wake() noexcept override;

 private:
  enum class Kind : std::uint32_t { none, whole, streamed, lent };
  struct Head;
  struct Description;
  struct Ring;
  // This rank's view of a ring that it sends into, and of one that it receives from. A position
  // counts all bytes that ever went through the ring.
  struct Outgoing {
    std::uint64_t position = 0;    // The next byte is written here.
    std::uint64_t read = 0;        // The last value of Ring::read that this rank has loaded.
    std::uint64_t identity = 0;    // The hash in the last description.
    std::size_t left = 0;          // Bytes of the current message that are not written yet.
    std::size_t block = 0;         // Bytes of it that are copied in at once.
    std::uint64_t lent_until = 0;  // The end of a lent message's record; 0: nothing is lent.
    bool spoken = false;           // The receiver knows that this rank sends to it.
  };
  struct Incoming {
    std::uint64_t position = 0;       // The next byte is read here.
    std::uint64_t written = 0;        // The last value of Ring::written that this rank has loaded.
    std::size_t left = 0;             // Bytes of the current message that are not read yet.
    const std::byte* lent = nullptr;  // The message in the sender's memory, if it is lent.
    bool begun = false;
    bool spoken = false;
    Envelope envelope;
  };

  static std::size_t room_for(int size);
  static std::size_t control_bytes(int size);
  Ring& ring(int from, int to) const;
  WaitQueue& queue(int rank) const;
  std::atomic<std::uint64_t>& senders(int to, int from) const;
  std::byte* at(Ring& ring, std::uint64_t position) const;
  Head& head(Ring& ring, std::uint64_t position) const;
  void copy_in(Ring& ring, std::uint64_t position, const void* data, std::size_t bytes) const;
  void copy_out(Ring& ring, std::uint64_t position, void* data, std::size_t bytes) const;
  std::size_t room(Ring& to, Outgoing& out, std::size_t wanted) const;

  std::byte* memory_;
  Board* board_;
  int size_, rank_;
  std::size_t room_;  // of a ring
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
};

}  // namespace pycollective
