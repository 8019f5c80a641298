// Messages between two ranks, beside the collectives: send and recv.
//
// A send is done when all of its data is in the pipe to the receiver. A rank that waits reads
// whatever comes for it, and keeps what nobody has asked for yet. So two ranks may both send first,
// whatever the length. Messages of one sender with one tag come in the order in which they were
// sent.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "executor/task.h"
#include "executor/waiting.h"
#include "transport/group.h"
#include "transport/pipes.h"

namespace pycollective {

// One send or receive. It stays where it is, and so does its data, until it is done.
class Message {
 public:
  Message(bool sends, int peer, const Envelope& envelope, void* data)
      : sends_(sends), peer_(peer), envelope_(envelope), data_(static_cast<std::byte*>(data)) {}
  Message(const Message&) = delete;
  Message& operator=(const Message&) = delete;

  bool done() const { return done_.load(std::memory_order_acquire); }
  std::uint64_t bytes() const { return envelope_.bytes; }

 private:
  friend class Messages;
  const bool sends_;
  const int peer_;
  const Envelope envelope_;
  std::byte* const data_;
  Clock::time_point began_{}, deadline_ = Clock::time_point::max();
  std::size_t moved_ = 0;
  bool begun_ = false;          // the pipe has the envelope of a send
  bool warned_ = false;         // that it takes long
  std::size_t seen_ = 0;        // how many bytes had moved at the last look,
  Clock::time_point since_{};   // and since when no more have
  std::shared_ptr<Task> task_;  // of an asynchronous one, while it is under way
  std::exception_ptr error_;
  std::atomic<bool> done_{false};
};

class Messages : public std::enable_shared_from_this<Messages> {
 public:
  Messages(std::shared_ptr<Group> group, int rank, Warning warning);
  // Waits for nothing: what is under way fails with the group, or is forgotten.
  ~Messages();

  // Begins a message, and polls `polls` times for its end. Returns true if it is done. Throws the
  // error of the message.
  // try_start() returns nothing where another thread is at this rank's messages.
  bool start(Message& message, int polls);
  std::optional<bool> try_start(Message& message, int polls);
  // Waits until a message is done, moving all that can be moved; throws what it has failed with.
  // Any other exception leaves the group failed.
  void finish(Message& message, const Waiting& waiting);
  // Begins a message that goes on while the caller does something else.
  std::shared_ptr<Task> post(bool sends, int peer, const Envelope& envelope, void* data,
                             const Waiting& waiting, std::shared_ptr<void> kept);
  // Lets go of what asynchronous messages that are done have kept.
  void collect();
  // Waits until all are done, each until its own deadline.
  void drain(const Interrupt& interrupt);
  std::size_t outstanding() const { return outstanding_.load(); }
  void warn_after(const Warning& warning);
  // Ends the thread.
  void stop();
  bool is_of_parent() const { return !origin_.is_here(); }

 private:
  class Posted;
  class Driving;
  // A message that has come, or is coming, and that nobody has asked for.
  struct Kept {
    Envelope envelope;
    std::unique_ptr<std::byte[]> data;
  };
  struct Peer {
    std::deque<Message*> sends, receives;
    std::deque<Kept> kept;
    std::size_t kept_bytes = 0;
    bool left = false;
    std::optional<Clock::time_point> ended;  // since when its pipe is known to have ended
    // What is being read, if anything: data for a receive, or data to be kept.
    Message* receiving = nullptr;
    std::optional<Kept> keeping;
    std::size_t data_read = 0;
  };

  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }

  // With the mutex held.
  bool start_locked(Message& message, int polls);
  void begin_receive(Message& message, Peer& peer);
  void send_to_self(Message& message, Peer& peer);
  // Returns what `move` returns; where it throws, all messages fail.
  template <class Move>
  bool guarded(Move move);
  // Each returns true if something moved.
  bool write_all();
  bool read_all();
  bool write(Peer& peer);
  bool write(Message& message);
  bool read(int from, Peer& peer);
  static bool wants(const Peer& peer);
  // The first receive that was posted for a tag, taken off the queue; nullptr if there is none.
  static Message* take_receive(Peer& peer, int tag);
  void begin_data(int from, Peer& peer, const Envelope& envelope);
  void end_data(Peer& peer);
  void deliver(Message& message, const Envelope& envelope, const std::byte* data);
  void compare(const Message& message, const Envelope& envelope);
  void check_peers(Clock::time_point now);
  void check_peers(Message& message, Clock::time_point now, bool moved);
  // Says to the others in which message this rank waits, if in any.
  void announce_waiting();
  void done(Message& message, std::exception_ptr error) noexcept;
  void fail_all(std::exception_ptr error) noexcept;
  [[noreturn]] void throw_failure();
  [[noreturn]] void fail_group(const Failure& failure);
  // A failure because of this rank: "rank 0 has no memory for …".
  Failure aborted(const std::string& why) const;
  static std::string describe(bool sends, int peer, const Envelope& envelope);
  static std::string describe(const Message& message);
  void warn(Message& message, Clock::time_point now);

  class PipesSleeper;
  // Without the mutex. Moves all messages until `is_over()`. Returns false at the deadline.
  template <class IsOver>
  bool drive(IsOver is_over, Clock::time_point deadline, const Interrupt& interrupt);
  void run();

  const std::shared_ptr<Group> group_;
  const int rank_;
  const Origin origin_;
  const std::shared_ptr<Pipes> pipes_;
  std::mutex mutex_;
  Warning warning_;
  std::vector<Peer> peers_;
  Clock::time_point looked_up_{};
  std::vector<std::string> warnings_;  // to be said without the mutex
  std::string announced_;              // to the others: in which message this rank waits
  bool failed_ = false;                // for ever: what was read last may not be whole
  int sleepers_ = 0;                   // threads that sleep until a peer does something

  // Written with the mutex held.
  std::atomic<std::size_t> outstanding_{0};
  std::atomic<std::size_t> posted_{0};  // asynchronous ones of these
  std::atomic<bool> ending_{false};

  // Asynchronous messages have a thread of their own. It stands back while others drive.
  std::atomic<int> drivers_{0};
  std::vector<std::shared_ptr<Task>> finished_;
  std::atomic<bool> has_finished_{false};
  bool resting_ = false;  // the thread waits for the next one
  std::condition_variable changed_;
  std::jthread thread_;
};

}  // namespace pycollective
