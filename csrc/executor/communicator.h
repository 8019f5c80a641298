// One rank's collectives: checks nothing that Python has checked, chooses the plan, and runs it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "algorithms/algorithms.h"
#include "algorithms/hierarchical.h"
#include "executor/direct.h"
#include "executor/executor.h"
#include "executor/messages.h"
#include "executor/task_queue.h"
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

// A call, ready to be made: by the direct path, or else by a plan.
struct PreparedCall {
  CallRecord record;
  DirectCall direct;
  const Plan* plan = nullptr;  // nullptr: by the direct path
  Buffers buffers;
  std::shared_ptr<const std::vector<Part>> parts;  // that `buffers` refers to
};

// Gives a call that was prepared without arrays its arrays.
PreparedCall with_arrays(PreparedCall prepared, const void* input, void* output);

class Communicator {
 public:
  Communicator(std::shared_ptr<Group> group, int rank);

  int rank() const { return rank_; }
  int size() const { return group_->size(); }
  Group& group() { return *group_; }

  // Prepares the collective that the algorithm is for. `reducing` is nullptr where data only moves.
  PreparedCall prepare(const Algorithm& algorithm, const Array& array, int root,
                       const Reducing* reducing);
  // The same of parts of different lengths, in items, one after the other in each buffer. Of a
  // gather's, a scatter's and an all-gather's all ranks know all lengths; an all-to-all's are known
  // to sender and receiver.
  PreparedCall prepare(const Algorithm& algorithm, const Array& array,
                       const std::vector<std::size_t>& counts, int root);
  PreparedCall prepare_all_to_all(const Array& array, const std::vector<std::size_t>& input_counts,
                                  const std::vector<std::size_t>& output_counts);
  PreparedCall prepare_barrier();

  // Makes a call, and waits for the others. Two parts of it: begin() polls `spins` times, and
  // returns true if the call is over; if not, finish() waits.
  void run(const PreparedCall& prepared, const Waiting& waiting);
  bool begin(const PreparedCall& prepared, int spins);
  void finish(const PreparedCall& prepared, const Waiting& waiting);
  // Begins a call that was prepared without arrays.
  bool begin(const PreparedCall& prepared, const void* input, void* output, int spins);
  // Makes a call while the caller does something else, within `limit` from its beginning on. Calls
  // are made one after the other. Whoever makes a call at once settles these first.
  std::shared_ptr<Task> submit(PreparedCall prepared, Clock::duration limit,
                               std::shared_ptr<void> kept);
  // The same of a call that was prepared without arrays. It begins at once if no other is under
  // way: the peers then find what this rank brings. Returns nullptr if it is over. start_tasks()
  // comes before.
  std::shared_ptr<Task> submit_at_once(const PreparedCall& prepared, const void* input,
                                       void* output, std::size_t bytes, Clock::duration limit,
                                       const std::function<std::shared_ptr<void>()>& keep);
  // The same of a function, which runs on a thread of the communicator's.
  std::shared_ptr<Task> submit(std::function<void()> function, std::shared_ptr<void> kept);

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
  // The polls of a call or message of this size for which a thread keeps Python's GIL, because
  // getting it back takes as long as the call. 0: the thread releases the GIL first.
  int held_polls(std::size_t bytes);
  // From now on, a call that has waited so long, or for half of its time, says once who is missing.
  void warn_after(Warning warning);
  const Warning& warning() const { return warning_; }

  // Starts the thread of asynchronous calls. Throws std::system_error.
  void start_tasks() {
    if (!tasks()) tasks_ = std::make_shared<TaskQueue>(group_);
  }
  // The program gets an error of a function that was submitted: close() need not raise it again.
  void note_told() { endpoint().note_thrown(); }
  // Lets go of what those that are done have kept.
  void collect() {
    if (tasks()) tasks_->collect();
  }
  // Waits until all of them are done, unless it is one of them that asks.
  void settle(const Interrupt& interrupt) {
    if (tasks_) settle_tasks(interrupt);
  }
  bool has_calls_under_way() const { return tasks_ && !tasks_->is_empty(); }
  // Messages between two ranks, which go beside the other calls.
  Messages& messages();
  // Waits for them, too.
  void settle_all(const Interrupt& interrupt);
  std::size_t outstanding();
  // Ends the threads when all is done. A thread of the communicator's cannot wait for its own end:
  // another thread then stops the communicator once more before it is destroyed.
  void stop();
  bool is_on_own_thread() { return tasks() && tasks_->is_this_thread(); }
  // Returns true if this process was forked from the one that made it.
  bool is_of_parent() const { return !origin_.is_here(); }

  // all_reduce of every rank of a group, by one thread; rank r's array is arrays[r].
  static void all_reduce_together(const std::vector<Communicator*>& communicators,
                                  const std::vector<Array>& arrays, Reducing reducing,
                                  const Algorithm& algorithm, const Waiting& waiting);

 private:
  class AsyncCall;
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
  PreparedCall record(const Algorithm& algorithm, const Array& array, int root,
                      const Reducing* reducing);
  // Where the buffers' chunks are parts; `single` is this rank's where a buffer has no other.
  void set_parts(PreparedCall& prepared, const Algorithm& algorithm, int root,
                 std::vector<Part> parts, Part single);
  void set_plan(PreparedCall& prepared, const Algorithm& algorithm, int root);
  // These two go on with the call that has begun.
  Progress advance();
  std::vector<int> awaited() const;
  bool poll(int spins);

  Endpoint& endpoint();
  bool has_messages();
  void settle_tasks(const Interrupt& interrupt);
  // nullptr where there is none, as in a forked child.
  TaskQueue* tasks();

  const Origin origin_;
  std::shared_ptr<Group> group_;
  int rank_;
  const bool among_threads_;                                  // of one interpreter
  Endpoint* endpoint_ = nullptr;                              // once it was asked for
  mutable std::shared_ptr<const Hierarchical> hierarchical_;  // once it was asked for
  std::variant<std::monostate, DirectExecution, Execution> begun_;
  Scratch scratch_;
  std::vector<Choice> choices_;
  Warning warning_;
  mutable std::mutex plans_mutex_;
  std::map<std::pair<const Algorithm*, int>, Planned> plans_;
  std::shared_ptr<TaskQueue> tasks_;
  std::shared_ptr<Messages> messages_;
};

}  // namespace pycollective
