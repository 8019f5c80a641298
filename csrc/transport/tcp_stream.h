// One connection that carries messages, in frames both ways.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <string>

#include "support/tuning.h"
#include "transport/sockets.h"
#include "transport/tcp_frame.h"

namespace pycollective::tcp {

// The first read of a frame asks for this much: a small message comes with one system call.
inline constexpr std::size_t kGulp = 4096;
static_assert(kGulp < kTcpDirectBytes);

// Memory of a stream for what arrives: aligned, kept, growing to the largest frame.
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
  // Takes a duplicate of a connected socket.
  void open(int given);
  void close() noexcept { socket_.close(); }
  int descriptor() const { return socket_.get(); }
  bool broken() const { return broken_; }

  // Going out: header and text, then a part, which stays the caller's memory.
  bool sending() const { return sending_; }
  void begin(const Header& header, const std::string& text, const std::byte* part);
  void stop_sending() { sending_ = false; }
  // Writes what there is room for; `moved` counts the system calls that moved bytes. False where
  // something is left, or the connection is found broken.
  bool write(std::uint64_t& moved);

  // Coming in: a frame at a time. read() goes on until one is whole, nothing has come, the
  // connection is found broken, or a header is there that was not before.
  enum class Read { whole, header, waiting };
  Read read(std::uint64_t& moved);
  bool whole() const { return whole_; }
  // Copies the header and the text of the next frame, which stays to be read. False where they have
  // not come, or where the frame is being read.
  bool peek(Header& header, std::string& text) const;
  // Valid from the header on, until accept() or release().
  const Header& header() const { return *reinterpret_cast<const Header*>(staging_.data()); }
  // After a header that has been checked: makes room for the frame.
  void accept();
  // Has the rest of the part read to where it belongs, if it is long enough to pay.
  void aim(std::byte* target);
  std::string text() const;
  const std::byte* part() const {
    return target_ ? target_ : staging_.data() + sizeof(Header) + header().text;
  }
  // Makes room for the next frame.
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

  // A frame begins where the staging memory does; the next one may follow it.
  mutable Staging staging_;
  std::size_t filled_ = 0;
  std::size_t frame_bytes_ = 0;  // 0 until the header is accepted
  bool whole_ = false;
  // Where a part is read to instead, and how much of it is there; the staging memory has the rest
  // of the frame.
  std::byte* target_ = nullptr;
  std::size_t in_target_ = 0;
};

}  // namespace pycollective::tcp
