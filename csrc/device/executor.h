// Enqueues a call of all ranks on their devices' streams. One thread does this without waiting for
// devices: streams wait for each other.
//
// A send records an event in the sender's stream. The receive makes the receiver's stream wait for
// the event, and reads the sender's memory. Within a run, the schedule guarantees that no rank
// overwrites memory that a peer still reads (step.h). A later message of this peer carries an event
// that the peer's stream reaches after the read. At the end, the stream of each rank whose memory
// was read waits for the readers' streams.
#pragma once

#include <cstddef>
#include <vector>

#include "device/runtime.h"
#include "executor/executor.h"
#include "schedule/step.h"

namespace pycollective::device {

// The properties of a call that are equal on all ranks. count as in Layout (executor/cut.h).
struct Shape {
  DType dtype = DType::u8;  // dtype and op are for collectives that reduce
  Op op = Op::sum;
  std::size_t count = 0;
  std::size_t item = 1;
};

// One rank's arrays, and the stream on which its work is ordered.
struct Share {
  int device = 0;
  Stream stream = 0;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::vector<Part> input_parts, output_parts;  // as in Layout; empty if chunks are not parts
};

// Enqueues a schedule, in the same blocks as on hosts (executor/cut.h).
void run_schedule(Runtime& runtime, const std::vector<Plan>& plans, const Shape& shape,
                  const std::vector<Share>& shares);

// Enqueues an all-reduce among devices that all reach each other. Contributions are combined in
// rank order. Ranks of one device share one kernel.
//
//   one shot  Each device combines all inputs into the outputs of its own ranks.
//   two shot  Each device combines its part of all inputs into all outputs.
void all_reduce_directly(Runtime& runtime, const Shape& shape, const std::vector<Share>& shares);

bool all_reach(Runtime& runtime, const std::vector<Share>& shares);

}  // namespace pycollective::device
