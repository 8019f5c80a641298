#include "transport/tcp_stream.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "support/round_up.h"

namespace pycollective::tcp {
namespace {

// Removes the padding of a text.
std::string trimmed(const char* data, std::size_t bytes) {
  std::string text(data, bytes);
  while (!text.empty() && text.back() == ' ') text.pop_back();
  return text;
}

}  // namespace

void Staging::reserve(std::size_t bytes, std::size_t used) {
  if (bytes <= capacity_) return;
  bytes = round_up(bytes, kCacheLine);
  std::unique_ptr<std::byte[], Free> larger(
      static_cast<std::byte*>(operator new(bytes, std::align_val_t{kCacheLine})));
  if (used) std::memcpy(larger.get(), data_.get(), used);
  data_ = std::move(larger);
  capacity_ = bytes;
}

void Stream::open(int given) {
  socket_ = duplicate_socket(given);
  staging_.reserve(2 * kFirstReadBytes, 0);
}

void Stream::begin(const Header& header, const std::string& text, const std::byte* part) {
  std::memcpy(prefix_, &header, sizeof header);
  std::memcpy(prefix_ + sizeof header, text.data(), header.text);
  prefix_bytes_ = sizeof header + header.text;
  part_ = part;
  part_bytes_ = header.bytes;
  written_ = 0;
  sending_ = true;
}

bool Stream::write(std::uint64_t& moved) {
  std::size_t whole = prefix_bytes_ + part_bytes_;
  while (written_ < whole) {
    iovec pieces[2];
    int count = 0;
    std::size_t from = 0;
    if (written_ < prefix_bytes_) {
      pieces[count++] = {prefix_ + written_, prefix_bytes_ - written_};
    } else {
      from = written_ - prefix_bytes_;
    }
    if (from < part_bytes_) {
      pieces[count++] = {const_cast<std::byte*>(part_) + from, part_bytes_ - from};
    }
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = static_cast<decltype(message.msg_iovlen)>(count);
    ssize_t sent = sendmsg(socket_.get(), &message, kSendFlags);
    if (sent < 0 && errno == EINTR) continue;
    Io io = result_of(sent);
    broken_ = io == Io::ended;
    if (io != Io::moved) return false;
    written_ += static_cast<std::size_t>(sent);
    ++moved;
  }
  sending_ = false;
  return true;
}

Stream::Read Stream::read(std::uint64_t& moved) {
  for (;;) {
    if (!frame_bytes_ && filled_ >= sizeof(Header)) return Read::header;
    if (complete()) {
      whole_ = true;
      return Read::whole;
    }
    if (broken_) return Read::waiting;
    std::byte* to = target_ ? target_ : staging_.data();
    std::size_t& have = target_ ? in_target_ : filled_;
    std::size_t until = target_ ? header().bytes : frame_bytes_ ? frame_bytes_ : kFirstReadBytes;
    ssize_t got = recv(socket_.get(), to + have, until - have, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    Io io = result_of(got);
    broken_ = io == Io::ended;
    if (io != Io::moved) return Read::waiting;
    have += static_cast<std::size_t>(got);
    ++moved;
  }
}

bool Stream::peek(Header& header, std::string& text) const {
  if (frame_bytes_ || broken_) return false;
  char frame[sizeof(Header) + kCallText];
  std::size_t have = std::min(filled_, sizeof frame);
  if (have) std::memcpy(frame, staging_.data(), have);
  if (have < sizeof frame) {
    ssize_t got = recv(socket_.get(), frame + have, sizeof frame - have, MSG_PEEK | MSG_DONTWAIT);
    if (got > 0) have += static_cast<std::size_t>(got);
  }
  if (have < sizeof header) return false;
  std::memcpy(&header, frame, sizeof header);
  if (wrong_with_message(header) || have < sizeof header + header.text) return false;
  text = trimmed(frame + sizeof header, header.text);
  return true;
}

void Stream::accept() {
  frame_bytes_ = sizeof(Header) + header().text + header().bytes;
  staging_.reserve(frame_bytes_ + kFirstReadBytes, filled_);
}

void Stream::read_directly_to(std::byte* target) {
  std::size_t before = sizeof(Header) + header().text;
  if (header().bytes < kTcpDirectBytes || filled_ < before) return;
  in_target_ = filled_ - before;
  std::memcpy(target, staging_.data() + before, in_target_);
  target_ = target;
}

std::string Stream::text() const {
  return trimmed(reinterpret_cast<const char*>(staging_.data() + sizeof(Header)), header().text);
}

void Stream::release() {
  filled_ -= target_ ? filled_ : frame_bytes_;
  target_ = nullptr;
  if (filled_) std::memmove(staging_.data(), staging_.data() + frame_bytes_, filled_);
  frame_bytes_ = 0;
  whole_ = false;
}

}  // namespace pycollective::tcp
