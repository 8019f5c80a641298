// RAII types for non-blocking sockets and pipes.
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

// A pipe with which a thread ends the poll() of another thread.
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

// Duplicates a connected stream socket, and sets it up for messages: non-blocking, without Nagle's
// algorithm and SIGPIPE. Throws std::invalid_argument if `given` is no such socket, and
// std::system_error if a system call fails.
Descriptor duplicate_socket(int given);

// Returns the numeric address of one end of a socket; empty if it is no IP socket.
std::string address_of(int fd, bool of_peer);

// The result of a system call on a socket. `ended`: the peer closed the connection, or it broke.
enum class Io { moved, blocked, ended };

// Converts the return value of send, sendmsg or recv. The caller repeats the call after EINTR.
Io result_of(ssize_t count);

}  // namespace pycollective
