// Pipes that are connections: one to each peer, of their own.
#pragma once

#include <vector>

#include "transport/pipes.h"

namespace pycollective {

class TcpPipes final : public Pipes {
 public:
  // Connected, non-blocking sockets by rank; -1 for this one. They are this object's from now on.
  explicit TcpPipes(std::vector<int> sockets);
  ~TcpPipes() override;
  TcpPipes(const TcpPipes&) = delete;
  TcpPipes& operator=(const TcpPipes&) = delete;

  std::size_t try_write(int peer, const std::byte* data, std::size_t bytes) override;
  std::size_t try_read(int peer, std::byte* data, std::size_t bytes) override;
  std::uint32_t listen() override { return 0; }
  void sleep(std::uint32_t heard, std::chrono::milliseconds limit,
             const std::vector<Interest>& interests) override;
  void wake() noexcept override;

 private:
  std::vector<int> sockets_;
  std::vector<bool> ended_;
  int wake_read_ = -1, wake_write_ = -1;
};

}  // namespace pycollective
