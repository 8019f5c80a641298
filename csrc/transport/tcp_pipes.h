// Pipes over TCP: one connection to each peer.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "transport/pipes.h"
#include "transport/sockets.h"

namespace pycollective {

class TcpPipes final : public Pipes {
 public:
  // Takes connected, non-blocking sockets by rank; none for this rank.
  explicit TcpPipes(std::vector<Descriptor> sockets);

  bool try_begin(int peer, const Envelope& envelope, const std::byte* data,
                 std::size_t& moved) override;
  std::size_t try_write(int peer, const std::byte* data, std::size_t bytes) override;
  const Envelope* try_next(int peer) override;
  std::size_t try_read(int peer, std::byte* data, std::size_t bytes) override;
  void end(int peer) override;
  bool has_ended(int peer) const override { return connection(peer).ended; }
  SpinLimit spin_limit(bool oversubscribed) const override;
  std::uint32_t announce_sleep() override { return 0; }
  bool sleep(std::uint32_t seen, Clock::duration limit,
             const std::vector<Interest>& interests) override;
  void end_sleep() override {}
  void wake() noexcept override;

 private:
  struct Connection {
    Descriptor socket;
    std::atomic<bool> ended{false};  // sleep() reads it without the caller's lock
    std::size_t envelope_sent = 0;
    Envelope envelope;  // of the incoming message
    std::size_t envelope_read = 0;
  };
  Connection& connection(int peer) const { return connections_[static_cast<std::size_t>(peer)]; }

  std::size_t size_;
  std::unique_ptr<Connection[]> connections_;
  WakePipe wake_;
};

}  // namespace pycollective
