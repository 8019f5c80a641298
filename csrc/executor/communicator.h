// One rank's collectives: checks nothing that Python has checked, chooses the plan, and runs it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "algorithms/algorithms.h"
#include "algorithms/hierarchical.h"
#include "executor/direct.h"
#include "executor/executor.h"
#include "executor/messages.h"
#include "executor/progress_thread.h"
#include "executor/waiting.h"
#include "transport/group.h"

namespace pycollective {

// A rank's data, and what all ranks must agree on about it.
struct Array {
  const void* input = nullptr;
  void* output = nullptr;
  std::vector<std::int64_t> shape;  // for messages and for finding mismatches, as a CallRecord's
  std::size_t count = 0;            // items of the whole array; where chunks are parts, of a part
  std::size_t item = 1;
  std::string type;  // the element type's name
};

// How a reduction is done.
struct Reducing {
  DType dtype;
  Op op;
  // Whether the bits of a result may depend on nothing but the contributions: with "direct".
  bool reproducible = false;
};

// What the ranks of a call must agree on, sealed.
CallRecord record_of(const Algorithm& algorithm, const Array& array, int root);

// Parts one after the other.
std::vector<Part> in_a_row(const std::vector<std::size_t>& counts);

// A call by the direct path of arrays of one shape and type: what a program that repeats it need
// not find out again.
struct PreparedCall {
  CallRecord call;
  DirectCall data;  // without the arrays
};

class Communicator {
 public:
  Communicator(std::shared_ptr<Group> group, int rank);

  int rank() const { return rank_; }
  int size() const { return group_->size(); }
  Group& group() { return *group_; }

  // The collective that the algorithm is for: one that reduces, one that only moves.
  void reduce(const Algorithm& algorithm, const Array& array, Reducing reducing, int root,
              const Waiting& waiting);
  void move(const Algorithm& algorithm, const Array& array, int root, const Waiting& waiting);
  void barrier(const Waiting& waiting);

  // What algorithm="auto" means here, for so many bytes; and rows that are asked before the
  // built-in ones, the same on all ranks, to be given before the first call.
  const Algorithm& select(Collective collective, std::size_t bytes) const;
  void prefer(std::vector<Choice> choices) { choices_ = std::move(choices); }

  // Returns true if all ranks share a board: collectives have a direct path then.
  bool has_board() { return endpoint().board() != nullptr; }
  // The hierarchical all-reduce for the hosts of this group, and whether it is of use: there are
  // several hosts, and one of them has several ranks.
  const Algorithm& hierarchical() const;
  bool has_levels() const;
  // Whether a call goes by the direct path: the ranks share a board, and the algorithm is "direct".
  bool goes_directly(const Algorithm& algorithm);
  // A call by the direct path in two parts: begin() spins `spins` times for the peers, and returns
  // true if all is done; if not, finish() waits for them. `reducing` is nullptr where data only
  // moves.
  PreparedCall prepare(const Algorithm& algorithm, const Array& array, int root,
                       const Reducing* reducing);
  bool begin(const PreparedCall& prepared, const void* input, void* output, int spins);
  void finish(const PreparedCall& prepared, const Waiting& waiting);
  // Gives up a call that has begun, because of an error of this rank's own.
  void give_up(const PreparedCall& prepared) noexcept { abandon(endpoint(), prepared.call); }

  // Parts of different lengths, in items, one after the other in each buffer. Of a gather's, a
  // scatter's and an all-gather's all ranks know all lengths; an all-to-all's are known to sender
  // and receiver.
  void move(const Algorithm& algorithm, const Array& array, const std::vector<std::size_t>& counts,
            int root, const Waiting& waiting);
  void all_to_all(const Array& array, const std::vector<std::size_t>& input_counts,
                  const std::vector<std::size_t>& output_counts, const Waiting& waiting);

  // From now on, a call that has waited so long, or for half of its time, says once who is missing.
  void warn_after(Warning warning);
  const Warning& warning() const { return warning_; }

  // A call that goes on while the caller does something else; they are made one after the other,
  // and whoever makes a call at once settles them first. The thread is started by the first one.
  std::shared_ptr<Task> submit(std::function<void()> call, std::shared_ptr<void> kept);
  // Starts the thread. Throws std::system_error.
  void start_progress() {
    if (!progress()) progress_ = std::make_unique<ProgressThread>();
  }
  // Lets go of what those that are done have kept.
  void collect() {
    if (progress()) progress_->collect();
  }
  // Waits until all of them are done, unless it is one of them that asks.
  void settle(const Interrupt& interrupt) {
    if (progress_) settle_progress(interrupt);
  }
  bool has_calls_under_way() { return progress_ && progress_->outstanding() > 0; }
  // Messages between two ranks, which go beside the other calls.
  Messages& messages();
  // Waits for them, too.
  void settle_all(const Interrupt& interrupt);
  std::size_t outstanding();
  // Ends the threads when all is done. The progress thread cannot wait for its own end: another
  // thread then stops the communicator once more before it is destroyed.
  void stop();
  bool is_on_progress_thread() { return progress() && progress_->is_this_thread(); }

  // all_reduce of every rank of a group, by one thread; rank r's array is arrays[r].
  static void all_reduce_together(const std::vector<Communicator*>& communicators,
                                  const std::vector<Array>& arrays, Reducing reducing,
                                  const Algorithm& algorithm, const Waiting& waiting);

 private:
  struct Planned {
    Plan plan;
    std::shared_ptr<const Algorithm> kept;  // of an algorithm that is not there for ever
  };

  static void directly_together(const std::vector<Communicator*>& communicators,
                                const std::vector<Array>& arrays, Reducing reducing,
                                const Waiting& waiting);
  // Ranks without data still meet, so that calls which do not belong together are found out.
  const Plan& plan(const Algorithm& algorithm, int root, std::size_t count);
  Buffers buffers_of(const Array& array, const Reduction* reduction);
  void run_directly(const PreparedCall& prepared, const Array& array, const Waiting& waiting);
  // A call whose chunks, or parts, are equal.
  void run_equal(const Algorithm& algorithm, int root, Buffers buffers, const CallRecord& call,
                 const Waiting& waiting);
  // Where the buffers' chunks are parts; `single` is this rank's where a buffer has no other.
  void run_parts(const Algorithm& algorithm, int root, Buffers buffers,
                 const std::vector<Part>& parts, Part single, const CallRecord& call,
                 const Waiting& waiting);
  void run(const Algorithm& algorithm, int root, Buffers buffers, const CallRecord& call,
           const Waiting& waiting);

  Endpoint& endpoint();
  bool has_messages();
  void settle_progress(const Interrupt& interrupt);
  // nullptr where there is none, as in a forked child.
  ProgressThread* progress();

  std::shared_ptr<Group> group_;
  int rank_;
  Endpoint* endpoint_ = nullptr;                              // once it was asked for
  mutable std::shared_ptr<const Hierarchical> hierarchical_;  // once it was asked for
  std::optional<DirectExecution> begun_;
  Scratch scratch_;
  std::vector<Choice> choices_;
  Warning warning_;
  mutable std::mutex plans_mutex_;
  std::map<std::pair<const Algorithm*, int>, Planned> plans_;
  std::unique_ptr<ProgressThread> progress_;
  std::shared_ptr<Messages> messages_;
};

}  // namespace pycollective
