// Pipes carry point-to-point messages. Each ordered pair of ranks has its own pipe, so messages use
// neither the sequence numbers nor the channels of collective calls. A Pipes object has all ends of
// one rank. It is not thread-safe.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "transport/transport.h"

namespace pycollective {

// The description that precedes a message's data. Plain data, shared between processes.
struct Envelope {
  static constexpr std::uint32_t kMagic = 0x6c69616d;  // "mail"
  static constexpr int kMaxDims = CallRecord::kMaxDims;

  Envelope() = default;
  Envelope(std::string_view type, const std::int64_t* shape, int dims, std::uint64_t bytes);

  // Returns the type and the shape, such as "float32[2, 3]".
  std::string describe() const;

  std::uint32_t magic = kMagic;
  std::int32_t tag = 0;
  std::uint64_t bytes = 0;
  std::uint64_t identity = 0;  // hash of type and shape
  std::int32_t dims = 0;       // `shape` has the first kMaxDims lengths
  char type[44] = {};
  std::int64_t shape[kMaxDims] = {};
};

// The operations that a rank waits for with a peer.
struct Interest {
  bool reads = false, writes = false;
};

class Pipes {
 public:
  virtual ~Pipes() = default;

  // The functions up to end() do not wait. Messages that a lost peer sent can still be received.
  //
  // Begins a message. Returns false while the pipe is too full. `moved` becomes the number of data
  // bytes that were sent with it.
  virtual bool try_begin(int peer, const Envelope& envelope, const std::byte* data,
                         std::size_t& moved) = 0;
  // Sends more data of the last message. Returns the number of bytes.
  virtual std::size_t try_write(int peer, const std::byte* data, std::size_t bytes) = 0;
  // Returns the peer's message that this rank has not ended; nullptr if there is none.
  virtual const Envelope* try_next(int peer) = 0;
  // Receives more data of that message. Returns the number of bytes.
  virtual std::size_t try_read(int peer, std::byte* data, std::size_t bytes) = 0;
  // Ends that message after all of its data was read.
  virtual void end(int peer) = 0;

  // Gives up all messages: afterwards no peer uses data of this rank's memory.
  virtual void withdraw() noexcept {}

  // Returns true if the connection to a peer has ended.
  virtual bool has_ended(int /*peer*/) const { return false; }

  virtual SpinLimit spin_limit(bool oversubscribed) const = 0;
  // As in Sleeper (support/waiter.h). sleep() also ends at wake(). `interests` has the awaited
  // operations for each peer.
  virtual std::uint32_t announce_sleep() = 0;
  virtual bool sleep(std::uint32_t seen, Clock::duration limit,
                     const std::vector<Interest>& interests) = 0;
  virtual void end_sleep() = 0;
  virtual void wake() noexcept = 0;
};

}  // namespace pycollective
