#include "transport/thread.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <thread>

#include "support/tuning.h"
#include "support/wait_queue.h"
#include "transport/ring_pipes.h"

namespace pycollective {
// A queue of kChannelSlots messages from one rank to another.
struct alignas(kCacheLine) ThreadGroup::Channel {
  struct Message {
    const void* data;
    std::size_t bytes;
    std::uint64_t fingerprint;
  };
  std::atomic<std::uint64_t> posted{0};  // written by the sender, as are the slots
  Message slots[kChannelSlots];
  alignas(kCacheLine) std::atomic<std::uint64_t> consumed{0};  // written by the receiver
  std::atomic<bool> reading{false};
};

struct alignas(kCacheLine) ThreadGroup::RankState {
  WaitQueue queue;
  alignas(kCacheLine) std::atomic<bool> busy{false};
  std::atomic<bool> left{false};
  mutable std::mutex mutex;  // guards the members below; the rank itself reads them without it
  CallHistory calls;
  std::string message;  // the point-to-point message in which it waits
};

class ThreadBoard final : public Board {
 public:
  ThreadBoard(ThreadGroup& group, int rank)
      : Board(group.board_, rank, group.queues(), /*with_staging=*/false), group_(group) {}
  // Threads can access all memory of their process: a handle is an address.
  std::uint64_t handle_of(const void* data, std::size_t) const override {
    return reinterpret_cast<std::uintptr_t>(data);
  }
  std::byte* address_of(int, std::uint64_t handle, std::size_t) override {
    return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(handle));
  }
  bool is_oversubscribed() const override { return group_.is_oversubscribed(); }
  [[noreturn]] void mismatch(int peer) override { group_.throw_mismatch(rank(), peer); }
  [[noreturn]] void cannot_read(int) override { throw std::logic_error("unreachable"); }

 private:
  ThreadGroup& group_;
};

class ThreadEndpoint final : public Endpoint {
 public:
  ThreadEndpoint(ThreadGroup& group, int rank) : group_(group), rank_(rank), board_(group, rank) {}

  int rank() const override { return rank_; }

  void enter(const CallRecord& call) override {
    auto& me = state();
    if (me.busy.exchange(true)) {
      throw std::logic_error("rank " + std::to_string(rank_) +
                             " is already in a collective call in another thread; a rank makes one "
                             "call at a time");
    }
    std::lock_guard lock(me.mutex);
    me.calls.add(call);
    board_.fingerprint = me.calls.fingerprint();
  }

  void leave() noexcept override {
    if (group_.failed_.load()) {
      // Peers that have begun to read finish. No peer begins after the failure, because it checks
      // failed_ after it has announced that it reads.
      for (int peer = 0; peer < group_.size_; ++peer) {
        while (group_.channel(rank_, peer).reading.load() || board_.is_any_peer_accessing()) {
          std::this_thread::yield();
        }
      }
    }
    state().busy.store(false, std::memory_order_release);
  }

  CallRecord call() const override { return group_.ranks_[rank_].calls.last(); }

  bool try_send(int peer, const void* data, std::size_t bytes) override {
    auto& channel = group_.channel(rank_, peer);
    std::uint64_t posted = channel.posted.load(std::memory_order_relaxed);
    if (posted - channel.consumed.load(std::memory_order_acquire) == kChannelSlots) return false;
    channel.slots[posted % kChannelSlots] = {data, bytes, state().calls.fingerprint()};
    channel.posted.store(posted + 1, std::memory_order_release);
    wake(peer);
    return true;
  }

  Piece try_receive(int peer, std::size_t bytes) override {
    auto& channel = group_.channel(peer, rank_);
    std::uint64_t consumed = channel.consumed.load(std::memory_order_relaxed);
    if (channel.posted.load(std::memory_order_acquire) == consumed) return {};
    const auto& message = channel.slots[consumed % kChannelSlots];
    if (message.fingerprint != state().calls.fingerprint() || message.bytes != bytes) {
      group_.throw_mismatch(rank_, peer);
    }
    channel.reading.store(true);
    if (group_.failed_.load()) {
      channel.reading.store(false);
      group_.check();
    }
    // nullptr means that there is no message.
    return {message.data ? message.data : &channel, bytes};
  }

  void release(int peer) override {
    auto& channel = group_.channel(peer, rank_);
    channel.reading.store(false, std::memory_order_release);
    channel.consumed.store(channel.consumed.load(std::memory_order_relaxed) + 1,
                           std::memory_order_release);
    wake(peer);
  }

  bool flushed() override {
    for (int peer = 0; peer < group_.size_; ++peer) {
      if (!flushed_to(peer)) return false;
    }
    return true;
  }

  bool flushed_to(int peer) override {
    auto& channel = group_.channel(rank_, peer);
    return channel.consumed.load(std::memory_order_acquire) ==
           channel.posted.load(std::memory_order_relaxed);
  }

  void check() override { group_.check(); }
  void fail(const Failure& failure) noexcept override { group_.fail(failure); }
  Board* board() override { return &board_; }

  SpinLimit spin_limit() override { return memory_spin_limit(group_.is_oversubscribed()); }
  void announce_sleep() override { seen_ = state().queue.announce_sleep(); }
  bool sleep(Clock::duration limit) override {
    return has_failed() || state().queue.sleep(seen_, limit);
  }
  void end_sleep() override { state().queue.end_sleep(); }
  bool has_failed() override { return group_.failed_.load(); }

  // Compares calls too, because different calls may wait for each other without any message.
  void check_peers() override {
    if (group_.compare(rank_)) group_.check();
    std::uint64_t number = group_.calls(rank_);
    for (int peer = 0; peer < group_.size_; ++peer) {
      auto& other = group_.ranks_[peer];
      if (peer == rank_ || !other.left.load()) continue;
      std::uint64_t calls = group_.calls(peer);
      if (calls >= number && !other.busy.load()) continue;
      group_.fail(peer_left_failure(group_.titled(peer), calls, group_.titled(rank_), call()));
      group_.check();
    }
  }

 private:
  Group& group() override { return group_; }
  ThreadGroup::RankState& state() { return group_.ranks_[rank_]; }
  void wake(int peer) { group_.ranks_[peer].queue.wake_if_asleep(); }

  ThreadGroup& group_;
  int rank_;
  std::uint32_t seen_ = 0;  // wake-ups before the sleep
  ThreadBoard board_;
};

ThreadGroup::ThreadGroup(int size)
    : size_(size),
      channels_(new Channel[static_cast<std::size_t>(size) * static_cast<std::size_t>(size)]),
      ranks_(new RankState[static_cast<std::size_t>(size)]) {
  board_memory_.reset(static_cast<std::byte*>(  // calloc() does not touch the pages
      std::calloc(1, Board::bytes_for(size, /*with_staging=*/false) + kCacheLine)));
  if (!board_memory_) throw std::bad_alloc();
  void* aligned = board_memory_.get();
  std::size_t bytes = Board::bytes_for(size, false) + kCacheLine;
  board_ = static_cast<std::byte*>(
      std::align(kCacheLine, Board::bytes_for(size, false), aligned, bytes));
  for (int r = 0; r < size; ++r) ranks_[static_cast<std::size_t>(r)].queue.prepare();
  for (int r = 0; r < size; ++r) endpoints_.push_back(std::make_unique<ThreadEndpoint>(*this, r));
}

ThreadGroup::~ThreadGroup() = default;

Endpoint& ThreadGroup::endpoint(int rank) { return *endpoints_.at(static_cast<std::size_t>(rank)); }

std::vector<WaitQueue*> ThreadGroup::queues() const {
  std::vector<WaitQueue*> queues;
  for (int r = 0; r < size_; ++r) queues.push_back(&ranks_[static_cast<std::size_t>(r)].queue);
  return queues;
}

ThreadGroup::Channel& ThreadGroup::channel(int from, int to) {
  return channels_[static_cast<std::size_t>(from) * static_cast<std::size_t>(size_) +
                   static_cast<std::size_t>(to)];
}

void ThreadGroup::fail(const Failure& failure) noexcept {
  {
    std::lock_guard lock(failure_mutex_);
    if (failure_) return;
    failure_ = failure;
    failed_.store(true);
  }
  for (int r = 0; r < size_; ++r) ranks_[static_cast<std::size_t>(r)].queue.wake();
}

std::shared_ptr<Pipes> ThreadGroup::pipes(int rank) {
  std::lock_guard lock(pipes_mutex_);
  if (!pipes_memory_) {
    auto* memory =
        static_cast<std::byte*>(std::calloc(RingPipes::bytes_for(size_) + kCacheLine, 1));
    if (!memory) {
      throw std::runtime_error("the system has no " + std::to_string(RingPipes::bytes_for(size_)) +
                               " bytes of memory for messages among " + std::to_string(size_) +
                               " ranks in one process");
    }
    pipes_memory_.reset(memory, [](std::byte* p) { std::free(p); });
  }
  std::size_t past = reinterpret_cast<std::uintptr_t>(pipes_memory_.get()) % kCacheLine;
  std::byte* begin = pipes_memory_.get() + (past ? kCacheLine - past : 0);
  return std::make_shared<RingPipes>(begin, size_, rank, nullptr);
}

std::optional<Failure> ThreadGroup::failure() const {
  std::lock_guard lock(failure_mutex_);
  return failure_;
}

void ThreadGroup::check() const {
  if (!failed_.load()) return;
  std::lock_guard lock(failure_mutex_);
  throw *failure_;
}

void ThreadGroup::throw_mismatch(int rank, int peer) {
  fail_mismatch(rank, peer);
  check();
  throw std::logic_error("unreachable");
}

void ThreadGroup::fail_mismatch(int rank, int peer) noexcept {
  auto calls_of = [this](int r) {
    std::lock_guard lock(ranks_[static_cast<std::size_t>(r)].mutex);
    return known_calls(ranks_[static_cast<std::size_t>(r)].calls);
  };
  fail(mismatch_failure(titled(rank), calls_of(rank), titled(peer), calls_of(peer)));
}

std::optional<Failure> ThreadGroup::compare(int rank) noexcept {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank) continue;
    auto& me = ranks_[static_cast<std::size_t>(rank)];
    auto& other = ranks_[static_cast<std::size_t>(peer)];
    bool differs;
    {
      std::scoped_lock lock(me.mutex, other.mutex);
      std::uint64_t number = std::min(me.calls.number(), other.calls.number());
      differs = me.calls.has(number) && other.calls.has(number) &&
                me.calls.fingerprint_of(number) != other.calls.fingerprint_of(number);
    }
    if (!differs || failed_.load()) continue;
    fail_mismatch(rank, peer);
    return failure();
  }
  return {};
}

void ThreadGroup::leave(int rank) noexcept {
  RankState& me = ranks_[static_cast<std::size_t>(rank)];
  if (me.left.exchange(true)) return;
  for (int r = 0; r < size_; ++r) ranks_[static_cast<std::size_t>(r)].queue.wake();
  compare(rank);
}

bool ThreadGroup::has_left(int rank) const {
  return ranks_[static_cast<std::size_t>(rank)].left.load();
}

void ThreadGroup::announce_message(int rank, const std::string& message) noexcept {
  RankState& me = ranks_[static_cast<std::size_t>(rank)];
  std::lock_guard lock(me.mutex);
  me.message = message;
}

std::uint64_t ThreadGroup::calls(int rank) const {
  const RankState& of = ranks_[static_cast<std::size_t>(rank)];
  std::lock_guard lock(of.mutex);
  return of.calls.number();
}

std::string ThreadGroup::describe(int rank) const {
  const RankState& of = ranks_[static_cast<std::size_t>(rank)];
  std::lock_guard lock(of.mutex);
  return describe_rank(title(rank), of.busy.load(), of.calls.last(), of.message);
}

}  // namespace pycollective
