// The schedule: what an algorithm is in this library.
//
// A buffer of a collective call is cut into *chunks* (collective.h says which). A *step* is one
// verb of one rank and speaks of chunks only, never of bytes or pointers. A *schedule* is the steps
// of all ranks, each rank's in order. An algorithm yields them (steps.h), and is the one truth: the
// executor runs the steps, the verifier proves them, the printer shows them, and none of them knows
// the algorithm's name.
//
// Sends are asynchronous: a sent span may be read until the matching receive is over, and the
// sender hears of that only through later messages. On each ordered pair of ranks messages keep
// their order, and one unreceived message must be enough for the schedule not to block for ever.
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
  send,         // source goes to peer
  recv,         // target = what peer sent
  recv_reduce,  // target = source (op) what peer sent
  copy,         // target = source
  reduce,       // target = target (op) source
};

// Scratch is memory of the rank's own that lasts as long as a run of the schedule. Its chunk i is
// as long as chunk i mod num_chunks, and holds nothing but that chunk.
enum class Buffer : std::uint8_t { input, output, scratch };

// Chunks [first, first + count) of a buffer; a span of no chunks is a bare signal. Where chunks are
// ranks' parts, the first part follows the last one: of 4, 3:5 are 3 and 0.
struct Span {
  Buffer buffer = Buffer::input;
  int first = 0;
  int count = 0;
};

struct Step {
  Verb verb = Verb::copy;
  // This reduction adds the last contribution: the place where a mean divides. The verifier checks
  // it.
  bool completes = false;
  int peer = -1;
  Span source;
  Span target;
};

// A span as algorithms write it: input(first, count). It is a number because GCC keeps each
// temporary object of a co_yield in the coroutine's frame; with spans in them, the frames of 10,000
// ranks would be twice as large and fall out of the cache.
enum class Chunks : std::uint64_t {};

inline Chunks chunks_of(Buffer buffer, int first, int count) {
  constexpr std::uint32_t kMask = 0x7fffffff;  // what is negative becomes too large
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

// An algorithm is written for root 0; make_plan renames the ranks for any other root. num_chunks is
// size where chunks are the ranks' parts.
class Algorithm : public std::enable_shared_from_this<Algorithm> {
 public:
  virtual ~Algorithm() = default;
  virtual std::string_view name() const = 0;
  virtual Collective collective() const = 0;
  virtual int num_chunks(int size) const = 0;
  virtual int num_scratch(int) const { return 0; }  // chunks of scratch that a rank needs
  virtual Steps steps(int rank, int size) const = 0;
  // Tells algorithms of one name apart.
  virtual std::uint64_t fingerprint() const { return 0; }
};

// One rank's steps, ready to run: what is cached, by (algorithm, rank, size, root).
struct Plan {
  int chunks = 1;
  int scratch = 0;
  int packed = 0;  // parts that are sent together with others
  std::vector<Step> steps;
};

Plan make_plan(const Algorithm& algorithm, int rank, int size, int root);

std::string to_string(const Step& step);

}  // namespace pycollective
