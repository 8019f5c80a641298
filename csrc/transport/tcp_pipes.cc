#include "transport/tcp_pipes.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

namespace pycollective {

TcpPipes::TcpPipes(std::vector<Descriptor> sockets)
    : sockets_(std::move(sockets)), ended_(new std::atomic<bool>[sockets_.size()]()) {}

std::size_t TcpPipes::try_write(int peer, const std::byte* data, std::size_t bytes) {
  ssize_t count;
  do {
    count = send(sockets_[static_cast<std::size_t>(peer)].get(), data, bytes, kSendFlags);
  } while (count < 0 && errno == EINTR);
  if (bytes > 0 && outcome(count) == Io::ended) ended_[static_cast<std::size_t>(peer)] = true;
  return count > 0 ? static_cast<std::size_t>(count) : 0;
}

std::size_t TcpPipes::try_read(int peer, std::byte* data, std::size_t bytes) {
  ssize_t count;
  do {
    count = recv(sockets_[static_cast<std::size_t>(peer)].get(), data, bytes, MSG_DONTWAIT);
  } while (count < 0 && errno == EINTR);
  if (bytes > 0 && outcome(count) == Io::ended) ended_[static_cast<std::size_t>(peer)] = true;
  return count > 0 ? static_cast<std::size_t>(count) : 0;
}

void TcpPipes::sleep(std::uint32_t, std::chrono::milliseconds limit,
                     const std::vector<Interest>& interests) {
  std::vector<pollfd> polled{{wake_.descriptor(), POLLIN, 0}};
  for (std::size_t r = 0; r < sockets_.size(); ++r) {
    int events = (interests[r].reads ? POLLIN : 0) | (interests[r].writes ? POLLOUT : 0);
    if (!sockets_[r].open() || !events || ended_[r]) continue;
    polled.push_back({sockets_[r].get(), static_cast<short>(events), 0});
  }
  if (poll(polled.data(), static_cast<nfds_t>(polled.size()), static_cast<int>(limit.count())) <= 0)
    return;
  if (polled[0].revents) wake_.drain();
}

void TcpPipes::wake() noexcept { wake_.wake(); }

}  // namespace pycollective
