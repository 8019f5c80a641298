// Where the ranks of a group, which are threads of one process, bring their calls on arrays of
// devices together: each posts what it brings, and the last one to come enqueues the call for all.
//
// A rank may post calls ahead of the others, who come to them in the same order. Ranks wait for
// each other as in all calls of the group: by its endpoints, which know its failures.
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

// What the table of algorithms knows them by; it has no rows of its own, as nothing was measured.
inline constexpr std::string_view kTransport = "devices";

// A call as one rank makes it, and what comes of it.
class Operation {
 public:
  CallRecord record;
  // nullptr: an all-reduce, as it is best for the ranks' devices.
  const Algorithm* algorithm = nullptr;
  std::shared_ptr<const Algorithm> kept;  // of one that is not there for ever
  int root = 0;
  bool timed = false;  // the device notes when it comes to the call, and is done with it
  Shape shape;
  Share share;
  std::optional<Stream>
      after;  // what that has been given so far comes first, in the share's stream
  Clock::time_point began, deadline;

  // Whether all ranks have come, so that it is enqueued.
  bool met() const { return met_.load(std::memory_order_acquire); }

 private:
  friend class Meeting;
  bool posted_ = false;
  std::uint64_t turn_ = 0;
  std::unique_ptr<Event> begin_, end_;
  std::atomic<bool> met_{false};
};

class Meeting {
 public:
  Meeting(std::shared_ptr<Group> group, std::shared_ptr<Runtime> runtime);

  Group& group() { return *group_; }
  Runtime& runtime() { return *runtime_; }
  // Puts a rank's stream behind what the call comes after, and marks the beginning of one that is
  // timed; throws as over().
  void begin(int rank, Operation& operation);
  // Throws the group's failure, which it also is when ranks' calls differ, or one cannot be
  // enqueued.
  void post(int rank, const std::shared_ptr<Operation>& operation);
  // Whether nobody reads or writes its rank's arrays any more: the device is done with it, or
  // nothing of it will ever happen. A device that has failed fails the group, which is thrown.
  bool over(int rank, const Operation& operation);
  // When the device came to a call that was timed, and was done with it, as seconds after an event
  // of it; nothing unless it is over.
  std::optional<std::pair<double, double>> times(int rank, const Operation& operation,
                                                 const Event& first);
  // Lets a stream of the rank's device wait for a call that is met; throws as over().
  void order(int rank, const Operation& operation, Stream stream);
  // Ranks that have not come to a call.
  std::vector<int> absent(const Operation& operation);
  // Returns when nobody reads any more what a rank has posted to a group that has failed.
  void settle() { std::lock_guard lock(mutex_); }

 private:
  using Operations = std::vector<std::shared_ptr<Operation>>;
  struct Turn {
    Operations operations;
    int come = 0;
  };
  struct Planned {
    std::vector<Plan> plans;  // of all ranks
    std::shared_ptr<const Algorithm> kept;
  };

  void check() const;
  // Fails the group, and throws why it has failed, for what a device said of a rank's call.
  [[noreturn]] void fail(int rank, const Operation& operation, const std::exception& error);
  void carry_out(const Operations& operations);
  void mark_ends(const Operations& operations);
  void enqueue(const Operation& one, const std::vector<Share>& shares);
  const std::vector<Plan>& plans(const Algorithm& algorithm, const Operation& one);

  const std::shared_ptr<Group> group_;
  const std::shared_ptr<Runtime> runtime_;
  std::mutex mutex_;                   // also held while a call is enqueued
  std::vector<std::uint64_t> posted_;  // by each rank
  std::uint64_t first_ = 0;            // turn of the first of these, to which not all have come
  std::deque<Turn> turns_;
  std::map<std::pair<const Algorithm*, int>, Planned> plans_;
};

// One rank's way to a meeting.
class Caller {
 public:
  // The communicator, of the meeting's group, stays there.
  Caller(Communicator& communicator, std::shared_ptr<Meeting> meeting);
  ~Caller() { leave(); }

  // Makes a call; unless it is to be done `later`, returns when all ranks have come.
  void call(const std::shared_ptr<Operation>& operation, bool later, const Interrupt& interrupt);
  // Waits until all ranks have come to one that was to be done later.
  void finish(Operation& operation, const Interrupt& interrupt);
  // Nobody will ask for its calls any more: those to which not all ranks have come never happen.
  void leave() noexcept;
  // As the meeting's, of this rank's calls.
  bool over(const Operation& operation) { return meeting_->over(communicator_.rank(), operation); }
  std::optional<std::pair<double, double>> times(const Operation& operation, const Event& first) {
    return meeting_->times(communicator_.rank(), operation, first);
  }
  void order(const Operation& operation, Stream stream) {
    meeting_->order(communicator_.rank(), operation, stream);
  }

  Communicator& communicator() { return communicator_; }
  Meeting& meeting() { return *meeting_; }

 private:
  void wait(Operation& operation, const Interrupt& interrupt);

  Communicator& communicator_;
  const std::shared_ptr<Meeting> meeting_;
  std::shared_ptr<Operation> last_;
};

}  // namespace pycollective::device
