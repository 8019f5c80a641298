// Point-to-point messages: send and recv.
//
// A send is done when all of its data is in the pipe to the receiver. A waiting rank reads all
// incoming messages, and stores unexpected ones (without a matching recv) in memory of its own. So
// two ranks may both send first, at any length. Messages from one sender with one tag do not
// overtake each other.
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

// One send or receive. Neither the object nor its data may move or be freed until it is done.
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
  bool begun_ = false;          // the envelope of a send is in the pipe
  bool warned_ = false;         // the warning about a long wait was given
  std::size_t last_moved_ = 0;  // moved_ at the last check
  Clock::time_point since_{};   // time of the last progress
  std::shared_ptr<Task> task_;  // of an asynchronous message that is not done
  std::exception_ptr error_;
  std::atomic<bool> done_{false};
};

class Messages : public std::enable_shared_from_this<Messages> {
 public:
  Messages(std::shared_ptr<Group> group, int rank, Warning warning);
  // Does not wait. Messages that are not done fail.
  ~Messages();

  // Begins a message and polls up to `polls` times. Returns true if it is done. Throws its error.
  // try_start() returns nothing, and does nothing, while another thread moves messages.
  bool start(Message& message, int polls);
  std::optional<bool> try_start(Message& message, int polls);
  // Waits until a message is done, and moves all messages meanwhile. Throws the message's error.
  // Any other exception also fails the group.
  void finish(Message& message, const Waiting& waiting);
  // Begins an asynchronous message.
  std::shared_ptr<Task> post(bool sends, int peer, const Envelope& envelope, void* data,
                             const Waiting& waiting, std::shared_ptr<void> kept);
  // Releases the objects that finished asynchronous messages kept alive.
  void collect();
  // Waits until all messages are done, each until its own deadline.
  void drain(const Interrupt& interrupt);
  std::size_t outstanding() const { return outstanding_.load(); }
  void warn_after(const Warning& warning);
  // Ends the thread.
  void stop();
  bool is_of_parent() const { return !origin_.is_here(); }

 private:
  class Posted;
  class Progressing;
  // A message without a matching recv.
  struct Unexpected {
    Envelope envelope;
    std::unique_ptr<std::byte[]> data;
  };
  struct Peer {
    std::deque<Message*> sends, receives;
    std::deque<Unexpected> unexpected;
    std::size_t unexpected_bytes = 0;
    bool left = false;
    std::optional<Clock::time_point> ended;  // first check that found the end of its pipe
    // The message that is being read, if any: one of the two.
    Message* receiving = nullptr;
    std::optional<Unexpected> receiving_unexpected;
    std::size_t data_read = 0;
  };

  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }

  // With the mutex held.
  bool start_locked(Message& message, int polls);
  void begin_receive(Message& message, Peer& peer);
  void send_to_self(Message& message, Peer& peer);
  // Returns the result of `move`. If it throws, all messages fail.
  template <class Move>
  bool guarded(Move move);
  // Each returns true if something moved.
  bool write_all();
  bool read_all();
  bool write(Peer& peer);
  bool write(Message& message);
  bool read(int from, Peer& peer);
  static bool wants(const Peer& peer);
  // Removes the first posted receive with a tag; nullptr if there is none.
  static Message* take_receive(Peer& peer, int tag);
  void begin_data(int from, Peer& peer, const Envelope& envelope);
  void end_data(Peer& peer);
  void deliver(Message& message, const Envelope& envelope, const std::byte* data);
  void compare(const Message& message, const Envelope& envelope);
  // Calls a function for each message that is not done.
  template <class Function>
  void for_each(Function function) {
    for (Peer& peer : peers_) {
      for (Message* message : peer.sends) function(*message);
      for (Message* message : peer.receives) function(*message);
      if (peer.receiving) function(*peer.receiving);
    }
  }
  void check_peers(Clock::time_point now);
  void check_peers(Message& message, Clock::time_point now, bool moved);
  // Tells the peers the message in which this rank waits.
  void announce_waiting();
  void done(Message& message, std::exception_ptr error) noexcept;
  void fail_all(std::exception_ptr error) noexcept;
  [[noreturn]] void throw_failure();
  [[noreturn]] void fail_group(const Failure& failure);
  // A failure that this rank caused: "rank 0 has no memory for …".
  Failure aborted(const std::string& why) const;
  static std::string describe(bool sends, int peer, const Envelope& envelope);
  static std::string describe(const Message& message);
  void warn(Message& message, Clock::time_point now);

  class PipesSleeper;
  // Called without the mutex. Moves all messages until `is_over()`. Returns false at the deadline.
  template <class IsOver>
  bool progress_until(IsOver is_over, Clock::time_point deadline, const Interrupt& interrupt);
  void run();

  const std::shared_ptr<Group> group_;
  const int rank_;
  const Origin origin_;
  const std::shared_ptr<Pipes> pipes_;
  std::mutex mutex_;
  Warning warning_;
  std::vector<Peer> peers_;
  Clock::time_point last_check_{};
  std::vector<std::string> warnings_;  // to be given without the mutex
  std::string announced_;              // the message in which this rank waits, as the peers know it
  bool failed_ = false;                // final: the last message may have been read in part only
  int sleepers_ = 0;                   // threads that sleep in the pipes

  // Written with the mutex held: the messages that are not done, and the asynchronous ones of them.
  std::atomic<std::size_t> outstanding_{0};
  std::atomic<std::size_t> posted_{0};
  std::atomic<bool> is_stopping_{false};

  // A thread moves asynchronous messages while no other thread does.
  std::atomic<int> progressing_{0};
  std::vector<std::shared_ptr<Task>> finished_;
  std::atomic<bool> has_finished_{false};
  bool is_idle_ = false;  // the thread sleeps until the next asynchronous message
  std::condition_variable changed_;
  std::jthread thread_;
};

}  // namespace pycollective
