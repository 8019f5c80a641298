// The control connection to one peer. A frame is a header and a text.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "transport/sockets.h"
#include "transport/tcp_frame.h"

namespace pycollective::tcp {

struct ControlFrame {
  Header header;
  std::string text;  // as the peer sent it; not checked: see clean()
};

// Not thread-safe.
class ControlChannel {
 public:
  // Duplicates a connected socket.
  void open(int given) { socket_ = duplicate_socket(given); }
  void close() noexcept { socket_.close(); }
  // Returns false before open(), after close(), and after end().
  bool is_open() const { return socket_.open() && !ended_; }
  int descriptor() const { return socket_.get(); }

  // Sends as much of a frame as the socket accepts; flush() sends the rest. Drops optional frames
  // (all but `failed`, `left` and `calls`) while the peer does not read.
  void send(Header header, const std::string& text) noexcept;
  void flush() noexcept;
  // Ends this rank's side of the connection, and discards received data.
  void shut_down() noexcept;

  // Receives data, up to a limit, so that a fast peer cannot block this rank. Returns Io::ended if
  // the peer has ended the connection; next() may still return frames.
  Io receive();
  // Returns the next complete frame.
  std::optional<ControlFrame> next();
  // Returns true if the peer sent an invalid frame.
  bool is_broken() const { return broken_; }
  // Stops sending and receiving.
  void end() { ended_ = true; }

 private:
  Descriptor socket_;
  bool ended_ = false;
  bool broken_ = false;
  std::string out_;
  std::vector<char> in_;
  std::size_t consumed_ = 0;  // bytes of in_ that next() has returned
};

}  // namespace pycollective::tcp
