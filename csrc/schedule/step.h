// The intermediate representation of algorithms.
//
// The buffers of a collective call are cut into *chunks* (collective.h). A *step* is one verb of
// one rank; it refers to chunks only, never to bytes or pointers. A *schedule* has the steps of all
// ranks, in order for each rank. An algorithm yields steps (steps.h) and is their only source: the
// executor runs them, the verifier proves them, the printer shows them. None of these knows the
// algorithm's name.
//
// Sends are asynchronous. A peer may read a sent span until its matching receive is over, and only
// later messages tell the sender that it is over. Messages between an ordered pair of ranks keep
// their order. A schedule must not deadlock if each pair can hold only one unreceived message.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "schedule/collective.h"
#include "schedule/steps.h"

namespace pycollective {

enum class Verb : std::uint8_t {
  send,         // send source to peer
  recv,         // target = the peer's message
  recv_reduce,  // target = source (op) the peer's message
  copy,         // target = source
  reduce,       // target = target (op) source
};

// Scratch is private memory of a rank for one run of the schedule. Chunk i of scratch is as long as
// chunk i mod num_chunks, and holds that chunk only.
enum class Buffer : std::uint8_t { input, output, scratch };

// Chunks [first, first + count) of a buffer; a message without chunks is only a signal. If chunks
// are ranks' parts, the first part follows the last one: in a buffer of 4 parts, 3:5 means parts 3
// and 0.
struct Span {
  Buffer buffer = Buffer::input;
  int first = 0;
  int count = 0;
};

struct Step {
  Verb verb = Verb::copy;
  // True if this reduction adds the last contribution, after which a mean divides. The verifier
  // checks it.
  bool completes = false;
  int peer = -1;
  Span source;
  Span target;
};

// A span as algorithms write it: input(first, count). It is a number because GCC keeps every
// temporary object of a co_yield in the coroutine's frame. With spans, the frames of 10,000 ranks
// would be twice as large and would not fit into the cache.
enum class Chunks : std::uint64_t {};

inline Chunks chunks_of(Buffer buffer, int first, int count) {
  constexpr std::uint32_t kMask = 0x7fffffff;  // negative numbers become too large
  return static_cast<Chunks>(static_cast<std::uint64_t>(buffer) << 62 |
                             static_cast<std::uint64_t>(first & kMask) << 31 | (count & kMask));
}
inline Span span(Chunks chunks) {
  auto packed = static_cast<std::uint64_t>(chunks);
  return {static_cast<Buffer>(packed >> 62), static_cast<int>(packed >> 31 & 0x7fffffff),
          static_cast<int>(packed & 0x7fffffff)};
}

inline Chunks input(int first, int count = 1) { return chunks_of(Buffer::input, first, count); }
inline Chunks output(int first, int count = 1) { return chunks_of(Buffer::output, first, count); }
inline Chunks scratch(int first, int count = 1) { return chunks_of(Buffer::scratch, first, count); }

inline Step send(int peer, Chunks source) { return {Verb::send, false, peer, span(source), {}}; }
inline Step recv(int peer, Chunks target) { return {Verb::recv, false, peer, {}, span(target)}; }
inline Step recv_reduce(int peer, Chunks source, Chunks target, bool completes) {
  return {Verb::recv_reduce, completes, peer, span(source), span(target)};
}
inline Step reduce(Chunks source, Chunks target, bool completes) {
  return {Verb::reduce, completes, -1, span(source), span(target)};
}
inline Step copy(Chunks source, Chunks target) {
  return {Verb::copy, false, -1, span(source), span(target)};
}

// Algorithms are written for root 0; make_plan renumbers the ranks for another root. num_chunks is
// size if chunks are ranks' parts.
class Algorithm : public std::enable_shared_from_this<Algorithm> {
 public:
  virtual ~Algorithm() = default;
  virtual std::string_view name() const = 0;
  virtual Collective collective() const = 0;
  virtual int num_chunks(int size) const = 0;
  virtual int num_scratch(int) const { return 0; }  // chunks of scratch that a rank needs
  virtual Steps steps(int rank, int size) const = 0;
  // Distinguishes algorithms with the same name.
  virtual std::uint64_t fingerprint() const { return 0; }
};

// One rank's steps, ready to run. Cached by (algorithm, rank, size, root).
struct Plan {
  int chunks = 1;
  int scratch = 0;
  int packed = 0;  // parts in messages of several parts
  std::vector<Step> steps;
};

Plan make_plan(const Algorithm& algorithm, int rank, int size, int root);

std::string to_string(const Span& span);
std::string to_string(const Step& step);

}  // namespace pycollective
