// One connection for the frames of messages, in both directions.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <string>

#include "support/tuning.h"
#include "transport/sockets.h"
#include "transport/tcp_frame.h"

namespace pycollective::tcp {

// Size of a frame's first read, so that a small message needs one system call.
inline constexpr std::size_t kFirstReadBytes = 4096;
static_assert(kFirstReadBytes < kTcpDirectBytes);

// Aligned memory for received frames, reused and as large as the largest frame.
class Staging {
 public:
  std::byte* data() { return data_.get(); }
  void reserve(std::size_t bytes, std::size_t used);

 private:
  struct Free {
    void operator()(std::byte* data) const { operator delete(data, std::align_val_t{kCacheLine}); }
  };
  std::unique_ptr<std::byte[], Free> data_;
  std::size_t capacity_ = 0;
};

class Stream {
 public:
  // Duplicates a connected socket.
  void open(int given);
  void close() noexcept { socket_.close(); }
  int descriptor() const { return socket_.get(); }
  bool broken() const { return broken_; }

  // Sending: begin() starts a frame. The memory of `part` must stay unchanged until it is written.
  bool sending() const { return sending_; }
  void begin(const Header& header, const std::string& text, const std::byte* part);
  void stop_sending() { sending_ = false; }
  // Writes as much as the socket accepts. Returns false if bytes are left, or the connection is
  // broken. `moved` counts the system calls that moved bytes.
  bool write(std::uint64_t& moved);

  // Receiving, one frame at a time. read() returns when the frame is complete, or when its header
  // has arrived (call accept() then). It also returns when no data is available or the connection
  // is broken.
  enum class Read { whole, header, waiting };
  Read read(std::uint64_t& moved);
  bool whole() const { return whole_; }
  // Copies the header and the text of the next frame without consuming them. Returns false if they
  // have not arrived, or if the frame is being read.
  bool peek(Header& header, std::string& text) const;
  // Available from Read::header until release(). accept() invalidates the reference.
  const Header& header() const { return *reinterpret_cast<const Header*>(staging_.data()); }
  // Accepts a header that the caller has checked, and allocates memory for its frame.
  void accept();
  // Reads the rest of the part directly to `target` if the part has at least kTcpDirectBytes.
  void read_directly_to(std::byte* target);
  std::string text() const;
  const std::byte* part() const {
    return target_ ? target_ : staging_.data() + sizeof(Header) + header().text;
  }
  // Discards the frame.
  void release();

 private:
  bool complete() const {
    return frame_bytes_ && (target_ ? in_target_ == header().bytes : filled_ >= frame_bytes_);
  }

  Descriptor socket_;
  bool broken_ = false;

  alignas(kCacheLine) std::byte prefix_[sizeof(Header) + kCallText];
  std::size_t prefix_bytes_ = 0;
  const std::byte* part_ = nullptr;
  std::size_t part_bytes_ = 0;
  std::size_t written_ = 0;
  bool sending_ = false;

  // The present frame is at the start of the staging memory. The next one may follow it.
  mutable Staging staging_;
  std::size_t filled_ = 0;
  std::size_t frame_bytes_ = 0;  // 0 until the header is accepted
  bool whole_ = false;
  // The target of read_directly_to(), and the bytes of the part there. Header and text are in
  // staging_.
  std::byte* target_ = nullptr;
  std::size_t in_target_ = 0;
};

}  // namespace pycollective::tcp
