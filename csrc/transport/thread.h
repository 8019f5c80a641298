// The in-process transport: ranks are threads, and a message is a pointer.
//
// Nothing is copied on the way: the receiver reads from the sender's own memory. That is safe
// because schedules are verified never to write a span that a peer may still read, and because
// leave() waits until peers have read everything (or, after a failure, until none of them is in the
// middle of it).
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace pycollective {

class ThreadGroup {
 public:
  explicit ThreadGroup(int size);
  ~ThreadGroup();
  ThreadGroup(const ThreadGroup&) = delete;
  ThreadGroup& operator=(const ThreadGroup&) = delete;

  int size() const { return size_; }
  Endpoint& endpoint(int rank);
  void fail(FailureKind kind, const std::string& message) noexcept;
  std::optional<Failure> failure() const;
  // How many calls each rank has begun, and what it is doing: "rank 0 is in …; rank 1 has …".
  std::string describe_ranks() const;

 private:
  friend class ThreadEndpoint;
  struct Channel;
  struct RankState;

  Channel& channel(int from, int to);
  void check() const;
  [[noreturn]] void throw_mismatch(int rank, int peer);

  int size_;
  int spins_;  // how often a waiting rank looks again before it sleeps
  std::unique_ptr<Channel[]> channels_;
  std::unique_ptr<RankState[]> ranks_;
  std::vector<std::unique_ptr<Endpoint>> endpoints_;
  std::atomic<bool> failed_{false};
  mutable std::mutex failure_mutex_;
  std::optional<Failure> failure_;
};

}  // namespace pycollective
