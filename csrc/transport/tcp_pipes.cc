#include "transport/tcp_pipes.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "support/tuning.h"

namespace pycollective {

TcpPipes::TcpPipes(std::vector<Descriptor> sockets)
    : size_(sockets.size()), connections_(new Connection[sockets.size()]) {
  for (std::size_t r = 0; r < size_; ++r) connections_[r].socket = std::move(sockets[r]);
}

bool TcpPipes::try_begin(int peer, const Envelope& envelope, const std::byte* data,
                         std::size_t& moved) {
  Connection& to = connection(peer);
  auto* rest = reinterpret_cast<std::byte*>(const_cast<Envelope*>(&envelope)) + to.envelope_sent;
  const std::size_t left = sizeof envelope - to.envelope_sent;
  iovec parts[] = {{rest, left},
                   {const_cast<std::byte*>(data), std::min(envelope.bytes, kTcpPartBytes)}};
  msghdr message = {};
  message.msg_iov = parts;
  message.msg_iovlen = envelope.bytes ? 2 : 1;
  ssize_t count;
  do {
    count = sendmsg(to.socket.get(), &message, kSendFlags);
  } while (count < 0 && errno == EINTR);
  if (result_of(count) == Io::ended) to.ended = true;
  const std::size_t sent = count > 0 ? static_cast<std::size_t>(count) : 0;
  if (sent < left) {
    to.envelope_sent += sent;
    return false;
  }
  to.envelope_sent = 0;
  moved = sent - left;
  return true;
}

std::size_t TcpPipes::try_write(int peer, const std::byte* data, std::size_t bytes) {
  Connection& to = connection(peer);
  ssize_t count;
  do {
    count = send(to.socket.get(), data, std::min(bytes, kTcpPartBytes), kSendFlags);
  } while (count < 0 && errno == EINTR);
  if (bytes > 0 && result_of(count) == Io::ended) to.ended = true;
  return count > 0 ? static_cast<std::size_t>(count) : 0;
}

const Envelope* TcpPipes::try_next(int peer) {
  Connection& from = connection(peer);
  while (from.envelope_read < sizeof(Envelope)) {
    std::size_t count =
        try_read(peer, reinterpret_cast<std::byte*>(&from.envelope) + from.envelope_read,
                 sizeof(Envelope) - from.envelope_read);
    if (count == 0) return nullptr;
    from.envelope_read += count;
  }
  return &from.envelope;
}

std::size_t TcpPipes::try_read(int peer, std::byte* data, std::size_t bytes) {
  Connection& from = connection(peer);
  ssize_t count;
  do {
    count = recv(from.socket.get(), data, bytes, MSG_DONTWAIT);
  } while (count < 0 && errno == EINTR);
  if (bytes > 0 && result_of(count) == Io::ended) from.ended = true;
  return count > 0 ? static_cast<std::size_t>(count) : 0;
}

void TcpPipes::end(int peer) { connection(peer).envelope_read = 0; }

SpinLimit TcpPipes::spin_limit(bool oversubscribed) const {
  return {oversubscribed ? kOversubscribedSpins : kPipeSpins, kYields};
}

bool TcpPipes::sleep(std::uint32_t, Clock::duration limit, const std::vector<Interest>& interests) {
  std::vector<pollfd> polled{{wake_.descriptor(), POLLIN, 0}};
  for (std::size_t r = 0; r < size_; ++r) {
    const Connection& to = connections_[r];
    int events = (interests[r].reads ? POLLIN : 0) | (interests[r].writes ? POLLOUT : 0);
    if (!to.socket.open() || !events || to.ended) continue;
    polled.push_back({to.socket.get(), static_cast<short>(events), 0});
  }
  const auto ms = std::chrono::ceil<std::chrono::milliseconds>(limit).count();
  const int ready = poll(polled.data(), static_cast<nfds_t>(polled.size()), static_cast<int>(ms));
  if (ready > 0 && polled[0].revents) wake_.drain();
  return ready >= 0;
}

void TcpPipes::wake() noexcept { wake_.wake(); }

}  // namespace pycollective
