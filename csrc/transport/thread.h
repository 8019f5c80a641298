// The in-process transport: ranks are threads, and a message is a pointer to the sender's memory.
//
// This is safe for two reasons. The verifier proves that a schedule never writes a span that a peer
// may still read. And the executor waits until the peers have read all messages; after a failure,
// leave() waits until no peer is reading.
#pragma once

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "support/cores.h"
#include "transport/board.h"
#include "transport/group.h"

namespace pycollective {

class ThreadGroup final : public Group {
 public:
  explicit ThreadGroup(int size);
  ~ThreadGroup() override;
  ThreadGroup(const ThreadGroup&) = delete;
  ThreadGroup& operator=(const ThreadGroup&) = delete;

  int size() const override { return size_; }
  Endpoint& endpoint(int rank) override;
  void fail(const Failure& failure) noexcept override;
  std::optional<Failure> failure() const override;
  bool finds_failure() const override { return failed_.load(); }
  std::shared_ptr<Pipes> pipes(int rank) override;
  std::string_view transport() const override { return "threads"; }
  bool is_oversubscribed() const override { return has_more_than_cores(size_); }
  std::uint64_t calls(int rank) const override;
  std::string describe(int rank) const override;
  void announce_message(int rank, const std::string& message) noexcept override;
  bool has_left(int rank) const override;
  void leave(int rank) noexcept override;

 private:
  friend class ThreadEndpoint;
  friend class ThreadBoard;
  struct Channel;
  struct RankState;

  Channel& channel(int from, int to);
  void check() const;
  [[noreturn]] void throw_mismatch(int rank, int peer);
  void fail_mismatch(int rank, int peer) noexcept;
  // Fails the group if a rank's calls differ from a peer's. Returns that failure.
  std::optional<Failure> compare(int rank) noexcept;
  std::vector<WaitQueue*> queues() const;

  int size_;
  std::unique_ptr<Channel[]> channels_;
  std::unique_ptr<RankState[]> ranks_;
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::byte, Free> board_memory_;
  std::byte* board_ = nullptr;  // in board_memory_, aligned to a cache line
  std::vector<std::unique_ptr<Endpoint>> endpoints_;
  std::atomic<bool> failed_{false};
  mutable std::mutex failure_mutex_;
  std::optional<Failure> failure_;
  std::mutex pipes_mutex_;
  std::shared_ptr<std::byte[]> pipes_memory_;  // allocated at the first use
};

}  // namespace pycollective
