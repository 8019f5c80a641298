// The control connection to one peer: frames both ways, each a header and a text.
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
  std::string text;  // as the peer sent it: clean() makes it readable
};

// The owner guards it with a mutex.
class ControlChannel {
 public:
  // Takes a duplicate of a connected socket.
  void open(int given) { socket_ = duplicate_socket(given); }
  void close() noexcept { socket_.close(); }
  // Returns false before open(), after close(), and after end().
  bool is_open() const { return socket_.open() && !ended_; }
  int descriptor() const { return socket_.get(); }

  // Sends as much of a frame as the socket takes; flush() sends the rest. A peer that does not read
  // gets no more than the frames of failures and leaves.
  void send(Header header, const std::string& text) noexcept;
  void flush() noexcept;
  // Ends this rank's side of the connection, and discards what has come.
  void shut_down() noexcept;

  // Receives what has come, up to a bound, so that a peer cannot keep this rank here. Returns
  // Io::ended once the peer has ended the connection, which next() may precede with frames.
  Io receive();
  // The next frame that has come whole.
  std::optional<ControlFrame> next();
  // Returns true if the peer sent something that is no control frame.
  bool is_broken() const { return broken_; }
  // From now on nothing is sent or received.
  void end() { ended_ = true; }

 private:
  Descriptor socket_;
  bool ended_ = false;
  bool broken_ = false;
  std::string out_;
  std::vector<char> in_;
  std::size_t taken_ = 0;  // bytes of in_ that next() has returned
};

}  // namespace pycollective::tcp
