// The executor runs one rank's steps over a transport. It knows no algorithm and no element type.
//
// The buffers are run through in blocks: each block is a complete run of the schedule over a
// segment of every chunk, so that what one step has written is still in the cache when the next one
// sends it. Nothing is allocated while it runs.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "executor/cut.h"
#include "reduce/reduce.h"
#include "schedule/step.h"
#include "support/tuning.h"
#include "transport/transport.h"

namespace pycollective {

// A rank's memory for scratch chunks: grows to what the largest call needs, and is kept.
class Scratch {
 public:
  // What was in it is lost when it grows.
  std::byte* at_least(std::size_t bytes);

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::unique_ptr<Line[]> lines_;
  std::size_t count_ = 0;
};

// The data of one call; input and output may be the same memory.
struct Buffers : Layout {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  const Reduction* reduction = nullptr;  // nullptr where nothing is reduced
  Scratch* scratch = nullptr;            // nullptr where the plan needs none
};

// A call in progress. advance() does what can be done without waiting, or some megabytes of it.
class Execution {
 public:
  Execution(const Plan& plan, const Buffers& buffers, Endpoint& endpoint,
            std::size_t segment_bytes = kSegmentBytes);

  // Done when all steps are, and everything sent has been read.
  Progress advance();
  // The ranks without which it does not go on.
  [[gnu::cold]] std::vector<int> awaited() const;

 private:
  bool try_step(const Step& step);
  bool try_send(const Step& step, std::size_t bytes);
  bool try_receive(const Step& step, std::size_t bytes);
  // Does the step's work on so many bytes of its span, from byte `first` on; `received`: what came
  // for them.
  void work(const Step& step, std::size_t first, std::size_t bytes, const void* received);
  std::byte* memory(Buffer buffer) const;
  std::byte* at(const Span& span, const Cut::Bytes& place) const {
    return memory(span.buffer) + place.offset;
  }

  const Plan& plan_;
  Buffers buffers_;
  Cut cut_;
  Endpoint& endpoint_;
  std::byte* scratch_ = nullptr;
  std::byte* packing_ = nullptr;  // where parts are put together that are sent together,
  std::size_t packed_ = 0;        // how many bytes of this block are there,
  bool is_packed_ = false;        // and whether the next step's already are
  std::size_t next_ = 0;          // next step
  std::size_t received_ = 0;      // bytes of the next step's message
  std::size_t worked_ = 0;        // bytes that the present advance() has sent, received or combined
};

// Begins a call, unless the group has failed.
inline void enter(Endpoint& endpoint, const CallRecord& call) {
  try {
    endpoint.check();
  } catch (...) {
    endpoint.note_thrown();
    throw;
  }
  endpoint.enter(call);
}

// After an error in the middle of a call: nobody is to wait for this rank.
void abandon(Endpoint& endpoint, const CallRecord& call) noexcept;

// Called now and then by a waiting rank: for whom it waits, and whether anything has moved since
// the last time. May throw to end the wait.
using CheckPeers = std::function<void(const std::vector<int>& awaited, bool moved)>;

// Waits until `attempt` is done; `awaited` says for whom. Returns false at the deadline.
bool wait_for(Endpoint& endpoint, const std::function<Progress()>& attempt,
              Clock::time_point deadline, const std::function<std::vector<int>()>& awaited,
              const CheckPeers& check_peers);

// Runs a plan of one rank to its end, waiting for the peers. Any exception leaves the group failed.
void run_blocking(const Plan& plan, const Buffers& buffers, const CallRecord& call,
                  Endpoint& endpoint, Clock::time_point deadline, const CheckPeers& check_peers);

// Runs a call of all ranks from one thread, which has all their buffers: in turn, or with a thread
// for each rank when there is much to move.
void run_together(const std::vector<const Plan*>& plans, const std::vector<Buffers>& buffers,
                  const CallRecord& call, const std::vector<Endpoint*>& endpoints,
                  Clock::time_point deadline, const Interrupt& interrupt);

}  // namespace pycollective
