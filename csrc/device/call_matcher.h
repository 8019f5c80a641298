// Matches the calls on device arrays of a group whose ranks are threads of one process. Each rank
// posts its arrays and stream; the last rank to post a call enqueues it for all ranks.
//
// A rank may post calls ahead of other ranks; calls are matched in order. Ranks wait for each other
// through the group's endpoints, which detect failures.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "device/executor.h"
#include "executor/communicator.h"
#include "transport/group.h"

namespace pycollective::device {

// The name of this transport in the table of algorithms. The table has no rows for it, because
// nothing was measured.
inline constexpr std::string_view kTransport = "devices";

// One rank's call on a device.
class Operation {
 public:
  CallRecord record;
  // nullptr: the best all-reduce for the ranks' devices.
  const Algorithm* algorithm = nullptr;
  std::shared_ptr<const Algorithm> kept;  // the owner of an algorithm written by a user
  int root = 0;
  bool timed = false;  // record the times at which the device begins and finishes the call
  Shape shape;
  Share share;
  std::optional<Stream> after;  // the call begins after the present work of this stream
  Clock::time_point began, deadline;

  // Returns true if all ranks have posted the call, so that it is enqueued.
  bool is_enqueued() const { return is_enqueued_.load(std::memory_order_acquire); }

 private:
  friend class CallMatcher;
  bool posted_ = false;
  std::uint64_t turn_ = 0;
  std::unique_ptr<Event> begin_, end_;
  std::atomic<bool> is_enqueued_{false};
};

class CallMatcher {
 public:
  CallMatcher(std::shared_ptr<Group> group, std::shared_ptr<Runtime> runtime);

  Group& group() { return *group_; }
  // Makes the rank's stream wait for operation.after, and records the begin of a timed call. Throws
  // like over().
  void begin(int rank, Operation& operation);
  // Posts a call. Throws the group's failure; calls that differ or cannot be enqueued fail the
  // group.
  void post(int rank, const std::shared_ptr<Operation>& operation);
  // Returns true if no device uses the rank's arrays any more: the call is finished, or will never
  // be executed. A failed device fails the group, and the failure is thrown.
  bool over(int rank, const Operation& operation);
  // Returns the times at which the device began and finished a timed call, in seconds after an
  // event of the device. Returns nothing if the call is not over.
  std::optional<std::pair<double, double>> times(int rank, const Operation& operation,
                                                 const Event& first);
  // Makes a stream of the rank's device wait for an enqueued call. Throws like over().
  void order(int rank, const Operation& operation, Stream stream);
  // Returns the ranks that have not posted the call.
  std::vector<int> absent(const Operation& operation);
  // After a failure of the group: returns when no thread uses the arrays that the rank has posted.
  void wait_for_users() { std::lock_guard lock(mutex_); }

 private:
  using Operations = std::vector<std::shared_ptr<Operation>>;
  struct Turn {
    Operations operations;
    int posted = 0;
  };
  struct Planned {
    std::vector<Plan> plans;  // by rank
    std::shared_ptr<const Algorithm> kept;
  };

  void check() const;
  // Fails the group because of an error of the device in a rank's call, and throws the failure.
  [[noreturn]] void fail(int rank, const Operation& operation, const std::exception& error);
  void match(const Operations& operations);
  void mark_ends(const Operations& operations);
  void enqueue(const Operation& one, const std::vector<Share>& shares);
  const std::vector<Plan>& plans(const Algorithm& algorithm, const Operation& one);

  const std::shared_ptr<Group> group_;
  const std::shared_ptr<Runtime> runtime_;
  std::mutex mutex_;                   // also held while a call is enqueued
  std::vector<std::uint64_t> posted_;  // number of posted calls, by rank
  std::uint64_t first_ = 0;  // turn of turns_[0], the first call that some rank has not posted
  std::deque<Turn> turns_;
  std::map<std::pair<const Algorithm*, int>, Planned> plans_;
};

// One rank's interface to a CallMatcher.
class Caller {
 public:
  // The communicator must belong to the matcher's group and outlive this object.
  Caller(Communicator& communicator, std::shared_ptr<CallMatcher> matcher);
  ~Caller() { leave(); }

  // Posts a call. Returns when all ranks have posted it, or at once if `later`.
  void call(const std::shared_ptr<Operation>& operation, bool later, const Interrupt& interrupt);
  // Waits until all ranks have posted a `later` call.
  void finish(Operation& operation, const Interrupt& interrupt);
  // Called when the rank will not use its calls any more. Calls that some rank has not posted are
  // never executed: fails the group if there are any.
  void leave() noexcept;
  // Like the functions of CallMatcher, for this rank's calls.
  bool over(const Operation& operation) { return matcher_->over(communicator_.rank(), operation); }
  std::optional<std::pair<double, double>> times(const Operation& operation, const Event& first) {
    return matcher_->times(communicator_.rank(), operation, first);
  }
  void order(const Operation& operation, Stream stream) {
    matcher_->order(communicator_.rank(), operation, stream);
  }

  Communicator& communicator() { return communicator_; }

 private:
  void wait(Operation& operation, const Interrupt& interrupt);

  Communicator& communicator_;
  const std::shared_ptr<CallMatcher> matcher_;
  std::shared_ptr<Operation> last_;
};

}  // namespace pycollective::device
