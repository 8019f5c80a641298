// Enqueues one call of all ranks on their devices' streams, from one thread, which waits for
// nothing: streams wait for each other.
//
// A send records an event in its rank's stream, and a receive waits for it in its own, and reads
// the sender's memory. That nothing is overwritten which a peer still reads is the schedule's
// promise within a run (step.h): a later message carries an event behind the read. At the end the
// stream of each rank that was read waits for those that read it.
#pragma once

#include <cstddef>
#include <vector>

#include "device/runtime.h"
#include "executor/executor.h"
#include "schedule/step.h"

namespace pycollective::device {

// What all ranks of a call have alike; counts as of Buffers.
struct Shape {
  DType dtype = DType::u8;  // with op, where something is reduced
  Op op = Op::sum;
  std::size_t count = 0;
  std::size_t item = 1;
};

// What a rank brings to a call, and the stream in whose order it happens to it.
struct Share {
  int device = 0;
  Stream stream = 0;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::vector<Part> input_parts, output_parts;  // where chunks are parts, as of Buffers
};

// A run of a schedule, in the blocks in which hosts run it (executor/cut.h).
void run_schedule(Runtime& runtime, const std::vector<Plan>& plans, const Shape& shape,
                  const std::vector<Share>& shares);

// An all-reduce of ranks whose devices all reach each other, in the order of the ranks. Ranks of
// one device have one launch.
//
//   one shot  every device combines all inputs into the outputs of its own ranks.
//   two shot  every device combines its part of all inputs, and writes it to all outputs.
void all_reduce_directly(Runtime& runtime, const Shape& shape, const std::vector<Share>& shares);

bool all_reach(Runtime& runtime, const std::vector<Share>& shares);

}  // namespace pycollective::device
