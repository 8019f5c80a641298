// Messages between two ranks, beside the collectives: send and recv.
//
// A message is an envelope (tag, type, shape) and the data, written into the pipe to the receiver.
// A send is done when all is written; a rank that waits reads whatever comes for it, and keeps what
// nobody has asked for yet. So two ranks may both send first, whatever the length. Messages of one
// sender with one tag come in the order in which they were sent.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "executor/progress_thread.h"
#include "executor/waiting.h"
#include "transport/group.h"
#include "transport/pipes.h"

namespace pycollective {

struct Message {
  int peer = 0;
  int tag = 0;
  std::string type;
  std::vector<std::int64_t> shape;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  Clock::time_point began, deadline;
};

class Messages {
 public:
  // `warning` stays there.
  Messages(std::shared_ptr<Group> group, int rank, const Warning& warning);
  // Waits for nothing: what is under way fails with the group, or is forgotten.
  ~Messages();

  std::shared_ptr<Task> send(Message message, std::shared_ptr<void> kept);
  std::shared_ptr<Task> receive(Message message, std::shared_ptr<void> kept);
  // Waits until one is done, moving all that can be moved; throws what it has thrown. Any other
  // exception leaves the group failed.
  void finish(Task& task, const Interrupt& interrupt);
  // From now on a thread moves what can be moved.
  void move_by_itself();
  // Waits until all are done, each until its own deadline.
  void drain(const Interrupt& interrupt);
  std::size_t outstanding();
  // Ends the thread.
  void stop();
  bool is_of_parent() const { return !origin_.is_here(); }

 private:
  struct Envelope {
    std::uint32_t magic = kMagic;
    std::int32_t tag = 0;
    std::uint64_t bytes = 0;
    std::int32_t dims = 0;
    char type[20] = {};
    std::int64_t shape[CallRecord::kMaxDims] = {};
    static constexpr std::uint32_t kMagic = 0x6c69616d;  // "mail"
  };
  struct Call {
    Message message;
    Envelope envelope;
    std::shared_ptr<Task> task;
    bool warned = false;      // that it takes long
    std::size_t moved = 0;    // bytes of envelope and data; of a receive, of the data
    std::size_t seen = 0;     // how many had moved at the last look,
    Clock::time_point since;  // and since when no more have
  };
  // A message that has come, or is coming, and that nobody has asked for.
  struct Kept {
    Envelope envelope;
    std::unique_ptr<std::byte[]> data;
  };
  struct Peer {
    std::deque<Call> sends, receives;
    std::deque<Kept> kept;
    std::size_t kept_bytes = 0;
    bool left = false;
    std::optional<Clock::time_point> ended;  // since when its pipe is known to have ended
    // What is being read: an envelope, then data for a receive, or data to be kept.
    Envelope envelope;
    std::size_t envelope_read = 0, data_read = 0;
    std::optional<Call> receiving;
    std::optional<Kept> keeping;
  };

  Call make_call(Message message, std::shared_ptr<void> kept);
  // With the mutex held, as all below: makes room for what is known of one more call, so that
  // done() allocates nothing. It counts only once it is in a list.
  void make_room();
  bool advance();
  bool write(int to, Peer& peer);
  bool read(int from, Peer& peer);
  static bool wants(const Peer& peer);
  void begin_data(int from, Peer& peer);
  void end_data(int from, Peer& peer);
  void take(Call& call, const Kept& kept);
  void compare(const Call& call, const Envelope& envelope);
  void look_up(Clock::time_point now, bool moved);
  // Says to the others in which message this rank waits, if in any.
  void tell_waiting();
  void done(Call& call, std::exception_ptr error) noexcept;
  void fail_all(std::exception_ptr error) noexcept;
  [[noreturn]] void throw_failure();
  [[noreturn]] void fail_group(FailureKind kind, const std::string& message);
  std::string describe(const Call& call, bool sends) const;
  void warn(Call& call, bool sends, std::size_t moved, Clock::time_point now);
  void drive();
  class PipesSleeper;
  // Moves what can be moved, and sleeps in between. The condition is read with the mutex held.
  void move_until(const std::function<bool()>& condition, const Interrupt& interrupt);
  void collect();

  const std::shared_ptr<Group> group_;
  const int rank_;
  const Origin origin_;
  const Warning& warning_;
  const std::shared_ptr<Pipes> pipes_;
  std::mutex mutex_;
  std::vector<Peer> peers_;
  std::size_t outstanding_ = 0;
  std::vector<std::shared_ptr<Task>> finished_;
  Clock::time_point looked_up_{};
  std::vector<std::string> warnings_;  // to be said without the mutex
  bool ending_ = false;
  std::string told_;     // to the others: in which message this rank waits
  bool failed_ = false;  // for ever: what was read last may not be whole
  std::condition_variable changed_;
  std::jthread thread_;
};

}  // namespace pycollective
