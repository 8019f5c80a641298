// Pipes that are connections: one to each peer, of their own.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "transport/pipes.h"
#include "transport/sockets.h"

namespace pycollective {

class TcpPipes final : public Pipes {
 public:
  // Connected, non-blocking sockets by rank; none for this one.
  explicit TcpPipes(std::vector<Descriptor> sockets);

  std::size_t try_write(int peer, const std::byte* data, std::size_t bytes) override;
  std::size_t try_read(int peer, std::byte* data, std::size_t bytes) override;
  bool has_ended(int peer) const override { return ended_[static_cast<std::size_t>(peer)]; }
  std::uint32_t listen() override { return 0; }
  void sleep(std::uint32_t heard, std::chrono::milliseconds limit,
             const std::vector<Interest>& interests) override;
  void wake() noexcept override;

 private:
  std::vector<Descriptor> sockets_;
  std::unique_ptr<std::atomic<bool>[]> ended_;  // sleep() looks at it with no lock held
  WakePipe wake_;
};

}  // namespace pycollective
