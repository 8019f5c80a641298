#include "transport/tcp_control.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace pycollective::tcp {
namespace {

constexpr int kMostReads = 64;

}  // namespace

void ControlChannel::send(Header header, const std::string& text) noexcept {
  if (!is_open()) return;
  bool optional = header.kind == Kind::in_call || header.kind == Kind::idle ||
                  header.kind == Kind::in_message || header.kind == Kind::wake_up;
  if (optional && !out_.empty()) return;
  header.text = static_cast<std::uint32_t>(std::min(text.size(), kControlText));
  out_.append(reinterpret_cast<const char*>(&header), sizeof header);
  out_.append(text, 0, header.text);
  flush();
}

void ControlChannel::flush() noexcept {
  while (!out_.empty()) {
    ssize_t sent = ::send(socket_.get(), out_.data(), out_.size(), kSendFlags);
    if (sent < 0 && errno == EINTR) continue;
    Io io = result_of(sent);
    if (io == Io::ended) out_.clear();  // receive() finds the reason
    if (io != Io::moved) return;
    out_.erase(0, static_cast<std::size_t>(sent));
  }
}

void ControlChannel::shut_down() noexcept {
  if (!socket_.open()) return;
  shutdown(socket_.get(), SHUT_WR);
  // Closing a socket with unread data resets the connection, which may lose sent frames.
  char rest[1024];
  for (int i = 0; i < kMostReads && recv(socket_.get(), rest, sizeof rest, MSG_DONTWAIT) > 0;) ++i;
}

Io ControlChannel::receive() {
  Io result = Io::blocked;
  for (int reads = 0; reads < kMostReads; ++reads) {
    char bytes[sizeof(Header) + kControlText];
    ssize_t got = recv(socket_.get(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    Io io = result_of(got);
    if (io == Io::blocked) return result;
    result = io;
    if (io == Io::ended) return result;
    in_.insert(in_.end(), bytes, bytes + got);
  }
  return result;
}

std::optional<ControlFrame> ControlChannel::next() {
  ControlFrame frame;
  const std::size_t received = in_.size() - consumed_;
  bool whole = !broken_ && received >= sizeof frame.header;
  if (whole) {
    std::memcpy(&frame.header, in_.data() + consumed_, sizeof frame.header);
    broken_ = !is_control(frame.header);
    whole = !broken_ && received >= sizeof frame.header + frame.header.text;
  }
  if (!whole) {
    in_.erase(in_.begin(), in_.begin() + static_cast<std::ptrdiff_t>(consumed_));
    consumed_ = 0;
    return {};
  }
  frame.text.assign(in_.data() + consumed_ + sizeof frame.header, frame.header.text);
  consumed_ += sizeof frame.header + frame.header.text;
  return frame;
}

}  // namespace pycollective::tcp
