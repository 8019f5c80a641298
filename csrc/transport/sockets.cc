#include "transport/sockets.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace pycollective {
namespace {

[[noreturn]] void throw_errno(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

void set_non_blocking(int fd) {
  int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) throw_errno("fcntl");
}

}  // namespace

void Descriptor::close() noexcept {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

WakePipe::WakePipe() {
  int ends[2];
  if (pipe(ends) != 0) throw_errno("cannot make a pipe");
  read_ = Descriptor(ends[0]);
  write_ = Descriptor(ends[1]);
  for (int end : ends) {
    set_non_blocking(end);
    fcntl(end, F_SETFD, FD_CLOEXEC);
  }
}

void WakePipe::wake() noexcept {
  char byte = 0;
  // A full pipe wakes the reader too.
  if (::write(write_.get(), &byte, 1) < 0) return;
}

void WakePipe::drain() noexcept {
  char rest[64];
  while (::read(read_.get(), rest, sizeof rest) > 0) continue;
}

void WakePipe::close() noexcept {
  read_.close();
  write_.close();
}

Descriptor duplicate_socket(int given) {
  int type = 0;
  socklen_t length = sizeof type;
  sockaddr_storage address{};
  socklen_t address_length = sizeof address;
  bool connected = given >= 0 && getsockopt(given, SOL_SOCKET, SO_TYPE, &type, &length) == 0 &&
                   type == SOCK_STREAM &&
                   getpeername(given, reinterpret_cast<sockaddr*>(&address), &address_length) == 0;
  if (!connected) {
    throw std::invalid_argument("descriptor " + std::to_string(given) +
                                " is not a connected stream socket");
  }
  Descriptor copy(fcntl(given, F_DUPFD_CLOEXEC, 0));
  if (!copy.open()) throw_errno("cannot duplicate a socket");
  set_non_blocking(copy.get());
  int on = 1;
  // Sockets that are not TCP refuse these options and need none.
  setsockopt(copy.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(copy.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
#if defined(SO_NOSIGPIPE)
  setsockopt(copy.get(), SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on);
#endif
  return copy;
}

std::string address_of(int fd, bool of_peer) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  auto* plain = reinterpret_cast<sockaddr*>(&address);
  if ((of_peer ? getpeername(fd, plain, &length) : getsockname(fd, plain, &length)) != 0) return {};
  char host[64];
  if (address.ss_family != AF_INET && address.ss_family != AF_INET6) return {};
  if (getnameinfo(plain, length, host, sizeof host, nullptr, 0, NI_NUMERICHOST) != 0) return {};
  return host;
}

Io result_of(ssize_t count) {
  if (count > 0) return Io::moved;
  return count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) ? Io::blocked : Io::ended;
}

}  // namespace pycollective
