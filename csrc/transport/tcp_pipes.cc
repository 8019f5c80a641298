#include "transport/tcp_pipes.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace pycollective {
namespace {

#if defined(MSG_NOSIGNAL)
constexpr int kSendFlags = MSG_DONTWAIT | MSG_NOSIGNAL;
#else  // macOS: SO_NOSIGPIPE, set on every socket
constexpr int kSendFlags = MSG_DONTWAIT;
#endif

}  // namespace

TcpPipes::TcpPipes(std::vector<int> sockets)
    : sockets_(std::move(sockets)), ended_(sockets_.size(), false) {
  int ends[2];
  if (pipe(ends) != 0) {
    int error = errno;
    for (int socket : sockets_) {
      if (socket >= 0) close(socket);
    }
    throw std::system_error(error, std::generic_category(), "cannot make a pipe");
  }
  wake_read_ = ends[0];
  wake_write_ = ends[1];
  for (int end : ends) {
    fcntl(end, F_SETFL, O_NONBLOCK);
    fcntl(end, F_SETFD, FD_CLOEXEC);
  }
}

TcpPipes::~TcpPipes() {
  for (int socket : sockets_) {
    if (socket >= 0) close(socket);
  }
  close(wake_read_);
  close(wake_write_);
}

// That a peer is gone is for the control connections to say.
std::size_t TcpPipes::try_write(int peer, const std::byte* data, std::size_t bytes) {
  ssize_t count;
  do {
    count = send(sockets_[static_cast<std::size_t>(peer)], data, bytes, kSendFlags);
  } while (count < 0 && errno == EINTR);
  bool ended = count < 0 && errno != EAGAIN && errno != EWOULDBLOCK;
  if (ended) ended_[static_cast<std::size_t>(peer)] = true;
  return count > 0 ? static_cast<std::size_t>(count) : 0;
}

std::size_t TcpPipes::try_read(int peer, std::byte* data, std::size_t bytes) {
  ssize_t count;
  do {
    count = recv(sockets_[static_cast<std::size_t>(peer)], data, bytes, MSG_DONTWAIT);
  } while (count < 0 && errno == EINTR);
  bool ended = bytes > 0 && (count == 0 || (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK));
  if (ended) ended_[static_cast<std::size_t>(peer)] = true;
  return count > 0 ? static_cast<std::size_t>(count) : 0;
}

void TcpPipes::sleep(std::uint32_t, std::chrono::milliseconds limit,
                     const std::vector<Interest>& interests) {
  std::vector<pollfd> polled{{wake_read_, POLLIN, 0}};
  for (std::size_t r = 0; r < sockets_.size(); ++r) {
    int events = (interests[r].reads ? POLLIN : 0) | (interests[r].writes ? POLLOUT : 0);
    if (sockets_[r] < 0 || !events || ended_[r]) continue;
    polled.push_back({sockets_[r], static_cast<short>(events), 0});
  }
  if (poll(polled.data(), static_cast<nfds_t>(polled.size()), static_cast<int>(limit.count())) <= 0)
    return;
  char rest[64];
  while (polled[0].revents && ::read(wake_read_, rest, sizeof rest) > 0) continue;
}

void TcpPipes::wake() noexcept {
  char byte = 0;
  // Full is as good: the sleeper wakes.
  if (::write(wake_write_, &byte, 1) < 0) return;
}

}  // namespace pycollective
