// The executor runs one rank's steps over a transport. It knows no algorithm and no element type.
//
// The executor runs the whole schedule once for each block (cut.h). A block is small, so data that
// one step writes is still in the cache when the next step sends it. Execution::advance() allocates
// no memory.
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

// A rank's memory for scratch chunks, reused by its calls.
class Scratch {
 public:
  // Discards the old contents if the memory grows.
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
  const Reduction* reduction = nullptr;  // nullptr if the call reduces nothing
  Scratch* scratch = nullptr;            // nullptr if the plan needs none
};

// A call in progress.
class Execution {
 public:
  Execution(const Plan& plan, const Buffers& buffers, Endpoint& endpoint,
            std::size_t segment_bytes = kSegmentBytes);

  // Does all that is possible without waiting, up to about kPieceBytes. The call is done when all
  // steps are done and the peers have read all sent data.
  Progress advance();
  // The ranks for which this rank waits.
  [[gnu::cold]] std::vector<int> awaited() const;

 private:
  bool try_step(const Step& step);
  bool try_send(const Step& step, std::size_t bytes);
  bool try_receive(const Step& step, std::size_t bytes);
  // Copies or combines `bytes` bytes of the step's span, from byte `first` on. `received` is the
  // peer's data for them.
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
  // Staging for parts that are sent together but are not adjacent. packed_ bytes of it are used in
  // this block. is_packed_ is true if it has the data of the next step.
  std::byte* packing_ = nullptr;
  std::size_t packed_ = 0;
  bool is_packed_ = false;
  std::size_t next_ = 0;      // index of the next step
  std::size_t received_ = 0;  // bytes of the next step's message
  std::size_t worked_ = 0;    // bytes that the present advance() has sent, received or combined
};

// Begins a call. Throws the group's failure if it has one.
inline void enter(Endpoint& endpoint, const CallRecord& call) {
  try {
    endpoint.check();
  } catch (...) {
    endpoint.mark_reported();
    throw;
  }
  endpoint.enter(call);
}

// Ends a call after an error: fails the group, so that no peer waits for this rank.
void abandon(Endpoint& endpoint, const CallRecord& call) noexcept;

// Called regularly by a waiting rank, with the ranks for which it waits, and whether there was
// progress since the last time. May throw to end the wait.
using CheckPeers = std::function<void(const std::vector<int>& awaited, bool moved)>;

// Calls `attempt` until it is done. Returns false at the deadline.
bool wait_for(Endpoint& endpoint, const std::function<Progress()>& attempt,
              Clock::time_point deadline, const std::function<std::vector<int>()>& awaited,
              const CheckPeers& check_peers);

// Runs a plan of one rank to its end. An exception also fails the group.
void run_blocking(const Plan& plan, const Buffers& buffers, const CallRecord& call,
                  Endpoint& endpoint, Clock::time_point deadline, const CheckPeers& check_peers);

// Runs a call of all ranks from one thread: rank by rank, or, from kTogetherThreadsFrom on, with a
// thread for each rank.
void run_together(const std::vector<const Plan*>& plans, const std::vector<Buffers>& buffers,
                  const CallRecord& call, const std::vector<Endpoint*>& endpoints,
                  Clock::time_point deadline, const Interrupt& interrupt);

}  // namespace pycollective
