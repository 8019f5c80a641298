// Sockets and pipes as objects that close themselves, without blocking.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <cstddef>
#include <string>
#include <utility>

namespace pycollective {

#if defined(MSG_NOSIGNAL)
inline constexpr int kSendFlags = MSG_DONTWAIT | MSG_NOSIGNAL;
#else  // macOS: SO_NOSIGPIPE, set on every socket
inline constexpr int kSendFlags = MSG_DONTWAIT;
#endif

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() { close(); }
  int get() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  void close() noexcept;

 private:
  int fd_ = -1;
};

// A pipe to a poll() of this process: another thread wakes it.
class WakePipe {
 public:
  // Throws std::system_error.
  WakePipe();
  int descriptor() const { return read_.get(); }
  void wake() noexcept;
  void drain() noexcept;
  void close() noexcept;

 private:
  Descriptor read_, write_;
};

// Another descriptor of a connected stream socket, set up for messages: it never blocks, sends at
// once and raises no signal. Throws std::invalid_argument for anything else, std::system_error.
Descriptor duplicate_socket(int given);

// The numeric address of one end of a socket; empty where there is none.
std::string address_of(int fd, bool of_peer);

// What a system call on a socket came to.
enum class Io { moved, blocked, ended };

// After send, sendmsg or recv, repeated while a signal interrupts them: of nothing received, the
// connection has ended.
Io outcome(ssize_t count);

}  // namespace pycollective
