// Pipes carry messages between two ranks, beside the collectives. Each ordered pair of ranks has a
// pipe of its own, so that messages touch neither the numbers nor the channels of collective calls.
// An object is one rank's ends, and its user guards it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "transport/transport.h"

namespace pycollective {

// The description that travels ahead of a message's data. Plain data, which processes share.
struct Envelope {
  static constexpr std::uint32_t kMagic = 0x6c69616d;  // "mail"
  static constexpr int kMaxDims = CallRecord::kMaxDims;

  Envelope() = default;
  Envelope(std::string_view type, const std::int64_t* shape, int dims, std::uint64_t bytes);

  // "float32[2, 3]".
  std::string describe() const;

  std::uint32_t magic = kMagic;
  std::int32_t tag = 0;
  std::uint64_t bytes = 0;
  std::uint64_t identity = 0;  // a hash of type and shape
  std::int32_t dims = 0;       // the shape has the first kMaxDims
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

  // None of these waits. A message that a lost peer has sent can still be received.
  //
  // Begins a message. Returns false while the pipe is too full for it. `moved` is how many bytes
  // of the data have gone with it.
  virtual bool try_begin(int peer, const Envelope& envelope, const std::byte* data,
                         std::size_t& moved) = 0;
  // Sends more of the data of the message that was begun last; returns how many bytes.
  virtual std::size_t try_write(int peer, const std::byte* data, std::size_t bytes) = 0;
  // The message that a peer has begun and this rank has not ended; nullptr if there is none.
  virtual const Envelope* try_next(int peer) = 0;
  // Receives more of its data; returns how many bytes.
  virtual std::size_t try_read(int peer, std::byte* data, std::size_t bytes) = 0;
  // Ends a message whose data has been read.
  virtual void end(int peer) = 0;

  // This rank gives up all of its messages: its memory is not read any more.
  virtual void withdraw() noexcept {}

  // Whether no more bytes can go to this peer, or come from it.
  virtual bool has_ended(int /*peer*/) const { return false; }

  virtual SpinLimit spin_limit(bool crowd) const = 0;
  // A thread that sleeps calls announce_sleep(), polls once more, calls sleep(), and at last
  // end_sleep(). sleep() ends when a peer does something of interest, when wake() is called, or at
  // the limit. It returns false if a signal ended it. The interests are those in each peer.
  virtual std::uint32_t announce_sleep() = 0;
  virtual bool sleep(std::uint32_t seen, Clock::duration limit,
                     const std::vector<Interest>& interests) = 0;
  virtual void end_sleep() = 0;
  virtual void wake() noexcept = 0;
};

}  // namespace pycollective
