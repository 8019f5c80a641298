// One rank's collectives: chooses the algorithm and its plan, and makes calls. The bindings check
// the arguments.
#pragma once

#include <cstdint>
#include <functional>
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

// A rank's arrays in a call.
struct Array {
  const void* input = nullptr;
  void* output = nullptr;
  std::vector<std::int64_t> shape;  // must be equal on all ranks (CallRecord)
  std::size_t count = 0;            // items of the array, or of one part if ranks exchange parts
  std::size_t item = 1;             // bytes of an item
  std::string type;                 // the element type's name
};

struct Reducing {
  DType dtype;
  Op op;
  // True: the algorithm "direct" gives bits that depend on the contributions alone.
  bool reproducible = false;
};

// Returns the sealed record of a call, without op.
CallRecord record_of(const Algorithm& algorithm, const Array& array, int root);

// Returns adjacent parts with these lengths.
std::vector<Part> contiguous_parts(const std::vector<std::size_t>& counts);

// A call that is ready to be made, on the direct path or by a plan.
struct PreparedCall {
  // If the ranks' parts may differ, the call begins on the direct path. It uses the plan if they
  // do.
  bool begins_directly() const { return !plan || direct.parts != Parts::equal; }

  CallRecord record;
  DirectCall direct;
  const Plan* plan = nullptr;  // nullptr: the call uses the direct path alone
  Buffers buffers;
  std::shared_ptr<const std::vector<Part>> parts;  // `buffers` points to them
};

// Sets the arrays of a call that was prepared without them.
PreparedCall with_arrays(PreparedCall prepared, const void* input, void* output);

class Communicator {
 public:
  Communicator(std::shared_ptr<Group> group, int rank);

  int rank() const { return rank_; }
  int size() const { return group_->size(); }
  Group& group() { return *group_; }

  // Prepares a call. The algorithm implies the collective. `reducing` is nullptr if the collective
  // reduces nothing.
  PreparedCall prepare(const Algorithm& algorithm, const Array& array, int root,
                       const Reducing* reducing);
  // Prepares a gather, scatter or all_gather of adjacent parts with different lengths, in items.
  // All ranks must pass the same counts.
  PreparedCall prepare(const Algorithm& algorithm, const Array& array,
                       const std::vector<std::size_t>& counts, int root);
  // Prepares an all_to_all with different lengths. Each length is known to its sender and receiver
  // only.
  PreparedCall prepare_all_to_all(const Array& array, const std::vector<std::size_t>& input_counts,
                                  const std::vector<std::size_t>& output_counts);
  PreparedCall prepare_barrier();

  // Makes a call. run() is begin(), then finish() if necessary: begin() polls `spins` times and
  // returns true if the call is done; finish() waits until it is done.
  void run(const PreparedCall& prepared, const Waiting& waiting);
  bool begin(const PreparedCall& prepared, int spins);
  void finish(const PreparedCall& prepared, const Waiting& waiting);
  // The same for a call that was prepared without arrays.
  bool begin(const PreparedCall& prepared, const void* input, void* output, int spins);
  // Makes an asynchronous call, which fails if it has not ended `limit` after its start.
  // Asynchronous calls are made one after another. A caller of run() or begin() must call
  // wait_for_tasks() first. `kept` keeps the arrays of the call alive.
  std::shared_ptr<Task> submit(PreparedCall prepared, Clock::duration limit,
                               std::shared_ptr<void> kept);
  // The same for a call that was prepared without arrays. If no other call is outstanding, the call
  // begins at once, so that the peers find this rank's data. Returns nullptr if it is done;
  // otherwise `keep` returns the object that keeps the arrays alive. `bytes` is the size of the
  // call (held_polls). start_tasks() must be called before.
  std::shared_ptr<Task> submit_at_once(const PreparedCall& prepared, const void* input,
                                       void* output, std::size_t bytes, Clock::duration limit,
                                       const std::function<std::shared_ptr<void>()>& keep);
  // The same for a function, which runs on the communicator's thread.
  std::shared_ptr<Task> submit(std::function<void()> function, std::shared_ptr<void> kept);

  // Returns the algorithm that "auto" selects for a call of this size. prefer() adds rows before
  // the built-in table; it must be called before the first call, with the same rows on all ranks.
  const Algorithm& select(Collective collective, std::size_t bytes) const;
  void prefer(std::vector<Choice> choices) { choices_ = std::move(choices); }

  // Returns true if all ranks share a board, so that calls can use the direct path.
  bool has_board() { return endpoint().board() != nullptr; }
  // The hierarchical all-reduce for the hosts of this group. It is useful if has_levels(): the
  // group has several hosts, and one of them has several ranks.
  const Algorithm& hierarchical() const;
  bool has_levels() const;
  // Returns true if a call uses the direct path: the ranks share a board, and the algorithm is the
  // collective's direct_algorithm().
  bool uses_direct_path(const Algorithm& algorithm);
  // Returns the number of polls for which a call or message of this size keeps the GIL. Reacquiring
  // the GIL would take as long as the call. 0: the thread releases the GIL first.
  int held_polls(std::size_t bytes);
  // Sets the warning of calls that wait long (waiting.h).
  void warn_after(Warning warning);
  const Warning& warning() const { return warning_; }

  // Starts the thread of asynchronous calls. Throws std::runtime_error (start_thread.h).
  void start_tasks() {
    if (!tasks()) tasks_ = std::make_shared<TaskQueue>(group_);
  }
  // The program has received the error of a submitted function, so close() need not raise it again.
  void mark_reported() { endpoint().mark_reported(); }
  // Releases the objects that finished asynchronous calls kept alive.
  void collect() {
    if (tasks()) tasks_->collect();
  }
  // Waits until all asynchronous calls are done. Does nothing within one of them.
  void wait_for_tasks(const Interrupt& interrupt) {
    if (tasks_) wait_for_task_queue(interrupt);
  }
  bool has_calls_under_way() const { return tasks_ && !tasks_->is_empty(); }
  // Point-to-point messages.
  Messages& messages();
  // Waits for all asynchronous calls and messages.
  void wait_for_all(const Interrupt& interrupt);
  std::size_t outstanding();
  // Ends the threads after all calls. Within an asynchronous call, stop() does not wait for the
  // thread's end; another thread must call it again before it destroys the communicator.
  void stop();
  bool is_on_own_thread() { return tasks() && tasks_->is_this_thread(); }
  // Returns true in a forked child of the process that made the communicator.
  bool is_of_parent() const { return !origin_.is_here(); }

  // Makes an all_reduce for every rank of a group from one thread. arrays[r] belongs to rank r.
  static void all_reduce_together(const std::vector<Communicator*>& communicators,
                                  const std::vector<Array>& arrays, Reducing reducing,
                                  const Algorithm& algorithm, const Waiting& waiting);

 private:
  class AsyncCall;
  struct Planned {
    Plan plan;
    std::shared_ptr<const Algorithm> kept;  // nullptr for built-in algorithms
  };

  static void direct_all_reduce_together(const std::vector<Communicator*>& communicators,
                                         const std::vector<Array>& arrays, Reducing reducing,
                                         const Waiting& waiting);
  // Without items, returns a barrier's plan: the ranks still exchange fingerprints.
  const Plan& plan(const Algorithm& algorithm, int root, std::size_t count);
  Buffers buffers_of(const Array& array, const Reduction* reduction);
  PreparedCall record(const Algorithm& algorithm, const Array& array, int root,
                      const Reducing* reducing);
  // Sets the parts of the buffers. `single` is this rank's part, for a buffer with one part.
  void set_parts(PreparedCall& prepared, const Algorithm& algorithm, int root,
                 std::vector<Part> parts, Part single);
  void set_plan(PreparedCall& prepared, const Algorithm& algorithm, int root);
  // For the call that has begun.
  Progress advance();
  std::vector<int> awaited() const;
  bool poll(int spins);

  Endpoint& endpoint();
  bool has_messages();
  void wait_for_task_queue(const Interrupt& interrupt);
  // nullptr before start_tasks() and in a forked child.
  TaskQueue* tasks();

  const Origin origin_;
  std::shared_ptr<Group> group_;
  int rank_;
  const bool among_threads_;                                  // ranks are threads of one process
  Endpoint* endpoint_ = nullptr;                              // set by endpoint()
  mutable std::shared_ptr<const Hierarchical> hierarchical_;  // set by hierarchical()
  std::variant<std::monostate, DirectExecution, Execution> execution_;
  // The plan of the present call, if it has one, and the buffers for it.
  const Plan* plan_ = nullptr;
  Buffers buffers_;
  Scratch scratch_;
  std::vector<Choice> choices_;
  Warning warning_;
  mutable std::mutex plans_mutex_;
  std::map<std::pair<const Algorithm*, int>, Planned> plans_;
  std::shared_ptr<TaskQueue> tasks_;
  std::shared_ptr<Messages> messages_;
};

}  // namespace pycollective
