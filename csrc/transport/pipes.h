// Bytes from rank to rank beside the collectives: what messages between two ranks travel through.
// Each ordered pair of ranks has a pipe with some room of its own, so that neither the numbers nor
// the channels of collective calls are touched. One rank's ends; guarded by whoever uses them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pycollective {

// What a rank would do with a peer if it could.
struct Interest {
  bool reads = false, writes = false;
};

class Pipes {
 public:
  virtual ~Pipes() = default;

  // Write what there is room for and read what is there, and say how many bytes that was; they
  // never wait. What a peer that is gone has written can still be read.
  virtual std::size_t try_write(int peer, const std::byte* data, std::size_t bytes) = 0;
  virtual std::size_t try_read(int peer, std::byte* data, std::size_t bytes) = 0;
  // Whether no more bytes can go to this peer, or come from it.
  virtual bool has_ended(int /*peer*/) const { return false; }

  // To sleep: listen(), look once more, then sleep() until a peer does something, somebody wakes
  // the sleeper, or the time is over; the interests are the peers'.
  virtual std::uint32_t listen() = 0;
  virtual void sleep(std::uint32_t heard, std::chrono::milliseconds limit,
                     const std::vector<Interest>& interests) = 0;
  virtual void wake() noexcept = 0;
};

// Pipes that are rings in memory that all ranks reach.
class RingPipes final : public Pipes {
 public:
  static std::size_t bytes_for(int size);
  // `memory` begins as zeros, on a cache line, and stays as long as this.
  RingPipes(std::byte* memory, int size, int rank);

  std::size_t try_write(int peer, const std::byte* data, std::size_t bytes) override;
  std::size_t try_read(int peer, std::byte* data, std::size_t bytes) override;
  std::uint32_t listen() override;
  void sleep(std::uint32_t heard, std::chrono::milliseconds limit,
             const std::vector<Interest>& interests) override;
  void wake() noexcept override;

 private:
  struct Ring;
  struct Sleeper;
  static std::size_t ring_bytes(int size);
  Ring& ring(int from, int to) const;
  Sleeper& sleeper(int rank) const;
  void wake_if_asleep(int rank) const;

  std::byte* memory_;
  int size_, rank_;
  std::size_t room_;  // of a ring
};

}  // namespace pycollective
