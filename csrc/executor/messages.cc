#include "executor/messages.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "support/reserve.h"
#include "support/start_thread.h"
#include "support/thread_name.h"
#include "support/tuning.h"
#include "support/waiter.h"

namespace pycollective {
namespace {

std::string in_words(const std::string& type, const std::int64_t* shape, int dims) {
  std::string text = type + "[";
  for (int i = 0; i < std::min(dims, CallRecord::kMaxDims); ++i) {
    if (i) text += ", ";
    text += std::to_string(shape[i]);
  }
  if (dims > CallRecord::kMaxDims) text += ", …";
  return text + "]";
}

}  // namespace

Messages::Messages(std::shared_ptr<Group> group, int rank, const Warning& warning)
    : group_(std::move(group)),
      rank_(rank),
      warning_(warning),
      pipes_(group_->pipes(rank)),
      peers_(static_cast<std::size_t>(group_->size())) {}

Messages::~Messages() { stop(); }

void Messages::stop() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
    changed_.notify_all();
  }
  pipes_->wake();
  if (thread_.joinable()) thread_.join();
  std::lock_guard lock(mutex_);
  fail_all(std::make_exception_ptr(Failure(
      FailureKind::aborted, "rank " + std::to_string(rank_) +
                                " let go of its communicator while messages were under way")));
}

Messages::Call Messages::make_call(Message message, std::shared_ptr<void> kept) {
  collect();
  if (group_->failure()) throw_failure();
  Call call;
  call.envelope.tag = message.tag;
  call.envelope.bytes = message.bytes;
  call.envelope.dims = static_cast<std::int32_t>(message.shape.size());
  std::strncpy(call.envelope.type, message.type.c_str(), sizeof call.envelope.type - 1);
  for (std::size_t i = 0; i < std::min<std::size_t>(message.shape.size(), CallRecord::kMaxDims);
       ++i) {
    call.envelope.shape[i] = message.shape[i];
  }
  call.since = message.began;
  call.message = std::move(message);
  call.task = std::make_shared<Task>(std::function<void()>(), std::move(kept));
  return call;
}

std::shared_ptr<Task> Messages::send(Message message, std::shared_ptr<void> kept) {
  Call call = make_call(std::move(message), std::move(kept));
  auto task = call.task;
  std::lock_guard lock(mutex_);
  make_room();
  Peer& peer = peers_[static_cast<std::size_t>(call.message.peer)];
  if (call.message.peer == rank_) {  // it is there already
    Kept copy{call.envelope, std::make_unique_for_overwrite<std::byte[]>(call.message.bytes)};
    if (call.message.bytes) {
      std::memcpy(copy.data.get(), call.message.data, call.message.bytes);
    }
    peer.envelope = call.envelope;
    peer.keeping = std::move(copy);
    end_data(rank_, peer);
    ++outstanding_;
    done(call, nullptr);
  } else {
    peer.sends.push_back(std::move(call));
    ++outstanding_;
    advance();
  }
  changed_.notify_all();
  pipes_->wake();
  return task;
}

std::shared_ptr<Task> Messages::receive(Message message, std::shared_ptr<void> kept) {
  Call call = make_call(std::move(message), std::move(kept));
  auto task = call.task;
  std::lock_guard lock(mutex_);
  make_room();
  Peer& peer = peers_[static_cast<std::size_t>(call.message.peer)];
  auto same_tag = [&](const Kept& k) { return k.envelope.tag == call.message.tag; };
  auto found = std::find_if(peer.kept.begin(), peer.kept.end(), same_tag);
  if (found != peer.kept.end()) {
    Kept came = std::move(*found);
    peer.kept.erase(found);
    peer.kept_bytes -= came.envelope.bytes;
    ++outstanding_;
    take(call, came);
  } else {
    peer.receives.push_back(std::move(call));
    ++outstanding_;
    advance();
  }
  changed_.notify_all();
  pipes_->wake();
  return task;
}

void Messages::make_room() {
  if (failed_) throw_failure();
  finished_.reserve(finished_.size() + outstanding_ + 1);
}

void Messages::take(Call& call, const Kept& kept) {
  try {
    compare(call, kept.envelope);
    if (call.message.bytes) std::memcpy(call.message.data, kept.data.get(), call.message.bytes);
    done(call, nullptr);
  } catch (...) {
    done(call, std::current_exception());
  }
}

// What the receiver has room for must be what was sent.
void Messages::compare(const Call& call, const Envelope& envelope) {
  const Envelope& mine = call.envelope;
  bool same = mine.bytes == envelope.bytes && mine.dims == envelope.dims &&
              std::memcmp(mine.type, envelope.type, sizeof mine.type) == 0 &&
              std::memcmp(mine.shape, envelope.shape, sizeof mine.shape) == 0;
  if (same) return;
  fail_group(FailureKind::mismatch,
             "rank " + std::to_string(rank_) + " receives " +
                 in_words(call.message.type, mine.shape, mine.dims) + " from rank " +
                 std::to_string(call.message.peer) + " with tag " + std::to_string(mine.tag) +
                 ", and rank " + std::to_string(call.message.peer) + " sent " +
                 in_words(std::string(envelope.type, strnlen(envelope.type, sizeof envelope.type)),
                          envelope.shape, envelope.dims) +
                 ": sender and receiver must agree on shape and dtype");
}

void Messages::throw_failure() {
  group_->endpoint(rank_).note_thrown();
  if (auto failure = group_->failure()) throw *failure;
  throw Failure(FailureKind::aborted, "the group has failed");
}

void Messages::fail_group(FailureKind kind, const std::string& message) {
  group_->fail(kind, message);
  throw_failure();
}

void Messages::done(Call& call, std::exception_ptr error) noexcept {
  if (error) group_->endpoint(rank_).note_thrown();
  call.task->finish(error);
  finished_.push_back(std::move(call.task));
  if (--outstanding_ > 0 || told_.empty()) return;
  told_.clear();
  group_->tell_message(rank_, told_);
}

void Messages::fail_all(std::exception_ptr error) noexcept {
  failed_ = true;
  for (Peer& peer : peers_) {
    for (Call& call : peer.sends) done(call, error);
    for (Call& call : peer.receives) done(call, error);
    if (peer.receiving) done(*peer.receiving, error);
    peer.sends.clear();
    peer.receives.clear();
    peer.receiving.reset();
  }
}

bool Messages::advance() {
  if (failed_) return false;
  bool moved = false;
  try {
    auto now = Clock::now();
    bool due = now - looked_up_ >= kWaitSlice;
    for (int r = 0; due && r < group_->size(); ++r) {  // before the last look at what they sent
      peers_[static_cast<std::size_t>(r)].left = group_->has_left(r);
    }
    for (int r = 0; r < group_->size(); ++r) {
      Peer& peer = peers_[static_cast<std::size_t>(r)];
      if (r == rank_) continue;
      moved = write(r, peer) || moved;
      moved = read(r, peer) || moved;
    }
    if (due) {
      looked_up_ = now;
      look_up(now, moved);
    }
  } catch (...) {
    // For what is not the group's failure yet.
    group_->fail(FailureKind::aborted,
                 "rank " + std::to_string(rank_) + " cannot go on with its messages");
    fail_all(std::current_exception());
  }
  return moved;
}

bool Messages::write(int to, Peer& peer) {
  bool moved = false;
  std::size_t gone = 0;
  while (!peer.sends.empty()) {
    Call& call = peer.sends.front();
    std::size_t whole = sizeof(Envelope) + call.message.bytes;
    while (call.moved < whole) {
      std::size_t count;
      if (call.moved < sizeof(Envelope)) {
        const auto* bytes = reinterpret_cast<const std::byte*>(&call.envelope);
        count = pipes_->try_write(to, bytes + call.moved, sizeof(Envelope) - call.moved);
      } else {
        count = pipes_->try_write(to, call.message.data + (call.moved - sizeof(Envelope)),
                                  whole - call.moved);
      }
      if (count == 0) return moved;
      call.moved += count;
      gone += count;
      moved = true;
      if (gone >= kPieceBytes && call.moved < whole) return moved;
    }
    done(call, nullptr);
    peer.sends.pop_front();
  }
  return moved;
}

// What is kept is bounded, unless somebody waits for what may come next.
bool Messages::wants(const Peer& peer) {
  return peer.receiving || peer.keeping || !peer.receives.empty() ||
         peer.kept_bytes <= kKeptMessageBytes;
}

bool Messages::read(int from, Peer& peer) {
  bool moved = false;
  // The peer may write as fast as this rank reads.
  for (std::size_t came = 0; came < kPieceBytes;) {
    if (peer.envelope_read < sizeof(Envelope)) {
      if (!wants(peer)) return moved;
      std::size_t count =
          pipes_->try_read(from, reinterpret_cast<std::byte*>(&peer.envelope) + peer.envelope_read,
                           sizeof(Envelope) - peer.envelope_read);
      if (count == 0) return moved;
      moved = true;
      came += count;
      peer.envelope_read += count;
      if (peer.envelope_read < sizeof(Envelope)) continue;
      begin_data(from, peer);
    }
    std::byte* target = peer.receiving ? peer.receiving->message.data : peer.keeping->data.get();
    while (peer.data_read < peer.envelope.bytes) {
      std::size_t count =
          pipes_->try_read(from, target + peer.data_read, peer.envelope.bytes - peer.data_read);
      if (count == 0) return moved;
      moved = true;
      came += count;
      peer.data_read += count;
      if (came >= kPieceBytes) break;
    }
    if (peer.data_read == peer.envelope.bytes) end_data(from, peer);
  }
  return moved;
}

void Messages::begin_data(int from, Peer& peer) {
  const Envelope& envelope = peer.envelope;
  if (envelope.magic != Envelope::kMagic) {
    fail_group(FailureKind::peer_lost, "rank " + std::to_string(from) +
                                           " sent no message of pycollective to rank " +
                                           std::to_string(rank_));
  }
  peer.data_read = 0;
  auto same_tag = [&](const Call& call) { return call.message.tag == envelope.tag; };
  auto found = std::find_if(peer.receives.begin(), peer.receives.end(), same_tag);
  if (found != peer.receives.end()) {
    compare(*found, envelope);
    peer.receiving = std::move(*found);
    peer.receives.erase(found);
    return;
  }
  try {
    peer.keeping = Kept{envelope, std::make_unique_for_overwrite<std::byte[]>(envelope.bytes)};
  } catch (const std::bad_alloc&) {
    fail_group(FailureKind::aborted, "rank " + std::to_string(rank_) +
                                         " has no memory for a message of " +
                                         std::to_string(envelope.bytes) + " bytes from rank " +
                                         std::to_string(from) + " that it has not asked for yet");
  }
}

void Messages::end_data(int, Peer& peer) {
  peer.envelope_read = 0;
  if (peer.receiving) {
    done(*peer.receiving, nullptr);
    peer.receiving.reset();
    return;
  }
  Kept came = std::move(*peer.keeping);
  peer.keeping.reset();
  // It may have been asked for while it came.
  auto same_tag = [&](const Call& call) { return call.message.tag == came.envelope.tag; };
  auto found = std::find_if(peer.receives.begin(), peer.receives.end(), same_tag);
  if (found == peer.receives.end()) {
    std::size_t bytes = came.envelope.bytes;
    peer.kept.push_back(std::move(came));
    peer.kept_bytes += bytes;
    return;
  }
  Call call = std::move(*found);
  peer.receives.erase(found);
  take(call, came);
}

void Messages::tell_waiting() {
  const Call* oldest = nullptr;
  bool sends = false;
  auto look_at = [&](const Call& call, bool is_send) {
    if (oldest && oldest->message.began <= call.message.began) return;
    oldest = &call;
    sends = is_send;
  };
  for (const Peer& peer : peers_) {
    if (!peer.sends.empty()) look_at(peer.sends.front(), true);
    if (!peer.receives.empty()) look_at(peer.receives.front(), false);
    if (peer.receiving) look_at(*peer.receiving, false);
  }
  std::string text = oldest ? describe(*oldest, sends) : "";
  if (text == told_) return;
  told_ = text;
  group_->tell_message(rank_, text);
}

std::string Messages::describe(const Call& call, bool sends) const {
  const Message& message = call.message;
  return (sends ? "send (" : "recv (") +
         in_words(message.type, call.envelope.shape, call.envelope.dims) + ", tag " +
         std::to_string(message.tag) + (sends ? ") to rank " : ") from rank ") +
         std::to_string(message.peer);
}

// Deadlines, the group's failure, and peers that have left.
void Messages::look_up(Clock::time_point now, bool moved) {
  if (auto failure = group_->failure()) throw *failure;
  tell_waiting();
  for (Peer& peer : peers_) {
    auto look_at = [&](Call& call, bool sends, std::size_t bytes) {
      std::string me = "rank " + std::to_string(rank_);
      if (!moved && peer.left && call.message.peer != rank_) {
        fail_group(FailureKind::peer_lost, "rank " + std::to_string(call.message.peer) +
                                               " has left the group, while " + me + " is in " +
                                               describe(call, sends));
      }
      // A peer that left or was lost is named by what comes over other connections.
      if (!moved && pipes_->has_ended(call.message.peer)) {
        if (!peer.ended) peer.ended = now;
        if (now - *peer.ended >= kEndedPipe) {
          fail_group(FailureKind::peer_lost, "the connection for messages between " + me +
                                                 " and rank " + std::to_string(call.message.peer) +
                                                 " has ended, while " + me + " is in " +
                                                 describe(call, sends));
        }
      }
      if (now < call.message.deadline) {
        warn(call, sends, bytes, now);
        return;
      }
      fail_group(FailureKind::timeout, me + " waited until its deadline in " +
                                           describe(call, sends) + ". " + group_->describe_ranks());
    };
    for (Call& call : peer.sends) look_at(call, true, call.moved);
    for (Call& call : peer.receives) look_at(call, false, 0);
    if (peer.receiving) look_at(*peer.receiving, false, peer.data_read);
  }
}

void Messages::warn(Call& call, bool sends, std::size_t moved, Clock::time_point now) {
  const Message& message = call.message;
  if (std::exchange(call.seen, moved) != moved) call.since = now;
  Clock::time_point deadline = call.since + (message.deadline - message.began);
  if (call.warned || !is_long(warning_, call.since, deadline, now)) return;
  call.warned = true;
  warnings_.push_back("rank " + std::to_string(rank_) + " has waited " +
                      in_seconds(now - call.since) + " in " + describe(call, sends) + ": " +
                      group_->describe(message.peer) + ". It gives up in " +
                      in_seconds(message.deadline - now) + ".");
}

// How a thread that moves messages sleeps: until a pipe has bytes or room for it.
class Messages::PipesSleeper final : public Sleeper {
 public:
  explicit PipesSleeper(Messages& messages) : messages_(messages) {}
  SpinLimit spin_limit() override { return {kSpins / 10, kYields}; }

  void announce_sleep() override {
    seen_ = messages_.pipes_->listen();
    listens_ = true;
  }

  bool sleep(Clock::duration limit) override {
    std::vector<Interest> interests;
    std::vector<std::string> warnings;
    {
      std::lock_guard lock(messages_.mutex_);
      warnings.swap(messages_.warnings_);
      for (const Peer& peer : messages_.peers_) {
        interests.push_back({wants(peer), !peer.sends.empty()});
      }
    }
    listens_ = false;
    messages_.pipes_->sleep(seen_, std::chrono::ceil<std::chrono::milliseconds>(limit), interests);
    for (const std::string& text : warnings) messages_.warning_.tell(text);
    return true;
  }

  void end_sleep() override {
    if (!std::exchange(listens_, false)) return;
    messages_.pipes_->sleep(seen_, {}, std::vector<Interest>(messages_.peers_.size()));
  }

 private:
  Messages& messages_;
  std::uint32_t seen_ = 0;
  bool listens_ = false;
};

void Messages::move_until(const std::function<bool()>& condition, const Interrupt& interrupt) {
  PipesSleeper sleeper(*this);
  auto poll = [&] {
    std::lock_guard lock(mutex_);
    const bool moved = advance();
    return condition() ? Progress::done : moved ? Progress::moved : Progress::blocked;
  };
  Waiter(sleeper, poll, Clock::time_point::max(), interrupt).wait();
}

void Messages::finish(Task& task, const Interrupt& interrupt) {
  try {
    bool by_itself;
    {
      std::lock_guard lock(mutex_);
      by_itself = thread_.joinable();
    }
    if (by_itself) {
      task.wait(Clock::time_point::max(), interrupt);
    } else {
      move_until([&] { return task.done(); }, interrupt);
    }
  } catch (...) {
    // The memory is the caller's again: nothing may be moved into it any more.
    use_reserve();
    group_->fail(FailureKind::aborted, "rank " + std::to_string(rank_) +
                                           " left a message because of an error of its own");
    std::lock_guard lock(mutex_);
    if (auto failure = group_->failure()) fail_all(std::make_exception_ptr(*failure));
    throw;
  }
  task.check();
}

void Messages::move_by_itself() {
  std::lock_guard lock(mutex_);
  if (thread_.joinable()) return;
  thread_ = start_thread([this] {
    name_this_thread("pc-messages");
    drive();
  });
}

void Messages::drive() {
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return ending_ || outstanding_ > 0; });
      if (ending_) return;
    }
    try {
      move_until([this] { return ending_ || outstanding_ == 0; }, {});
    } catch (const std::exception& error) {
      group_->fail(FailureKind::aborted, "rank " + std::to_string(rank_) +
                                             " cannot go on with its messages: " + error.what());
      std::lock_guard lock(mutex_);
      fail_all(std::current_exception());
    }
  }
}

void Messages::drain(const Interrupt& interrupt) {
  move_until([this] { return outstanding_ == 0; }, interrupt);
}

std::size_t Messages::outstanding() {
  std::lock_guard lock(mutex_);
  return outstanding_;
}

void Messages::collect() {
  std::vector<std::shared_ptr<Task>> finished;
  std::lock_guard lock(mutex_);
  finished.swap(finished_);
}

}  // namespace pycollective
