#include "executor/messages.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#include "support/reserve.h"
#include "support/start_thread.h"
#include "support/thread_name.h"
#include "support/tuning.h"
#include "support/waiter.h"

namespace pycollective {

// Counts a thread that moves messages while it waits.
class Messages::Progressing {
 public:
  explicit Progressing(Messages& messages) : messages_(messages) {
    messages_.progressing_.fetch_add(1);
  }
  ~Progressing() { messages_.progressing_.fetch_sub(1); }
  Progressing(const Progressing&) = delete;
  Progressing& operator=(const Progressing&) = delete;

 private:
  Messages& messages_;
};

class Messages::Posted final : public Task {
 public:
  Posted(Messages& messages, bool sends, int peer, const Envelope& envelope, void* data,
         std::shared_ptr<void> kept)
      : Task(std::move(kept)),
        message(sends, peer, envelope, data),
        messages_(messages.weak_from_this()),
        group_(messages.group_),
        rank_(messages.rank_) {}

  bool wait(Clock::time_point deadline, const Interrupt& interrupt) override {
    refuse_in_child();
    auto messages = messages_.lock();
    if (!messages) return done();
    Progressing progressing(*messages);
    return messages->progress_until([this] { return done(); }, deadline, interrupt);
  }
  std::shared_ptr<void> owner() override { return messages_.lock(); }

  Message message;

 private:
  void mark_reported() override { group_->endpoint(rank_).mark_reported(); }

  const std::weak_ptr<Messages> messages_;
  const std::shared_ptr<Group> group_;
  const int rank_;
};

Messages::Messages(std::shared_ptr<Group> group, int rank, Warning warning)
    : group_(std::move(group)),
      rank_(rank),
      pipes_(group_->pipes(rank)),
      warning_(std::move(warning)),
      peers_(static_cast<std::size_t>(group_->size())) {}

Messages::~Messages() { stop(); }

void Messages::stop() {
  {
    std::lock_guard lock(mutex_);
    is_stopping_ = true;
    changed_.notify_all();
  }
  pipes_->wake();
  if (thread_.joinable()) thread_.join();
  std::lock_guard lock(mutex_);
  fail_all(
      std::make_exception_ptr(aborted("deleted its communicator before its messages were done")));
}

void Messages::warn_after(const Warning& warning) {
  std::lock_guard lock(mutex_);
  warning_ = warning;
}

// Beginning ------------------------------------------------------------------------------------

bool Messages::start(Message& message, int polls) {
  std::lock_guard lock(mutex_);
  return start_locked(message, polls);
}

std::optional<bool> Messages::try_start(Message& message, int polls) {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return {};
  return start_locked(message, polls);
}

bool Messages::start_locked(Message& message, int polls) {
  if (failed_ || group_->finds_failure()) {
    group_->endpoint(rank_).mark_reported();
    throw_failure();
  }
  Peer& peer = this->peer(message.peer_);
  if (!message.sends_) {
    begin_receive(message, peer);
  } else if (message.peer_ == rank_) {
    send_to_self(message, peer);
  } else {
    peer.sends.push_back(&message);
    ++outstanding_;
  }
  for (int poll = 0; !message.done() && poll < polls; ++poll) {
    bool moved = guarded([&] { return message.sends_ ? write(peer) : read(message.peer_, peer); });
    if (!moved && poll + 1 < polls) pause();
  }
  if (!message.done()) {
    if (sleepers_ > 0) pipes_->wake();  // a sleeper must also wait for this message's peer
    return false;
  }
  if (message.error_) std::rethrow_exception(message.error_);
  return true;
}

void Messages::begin_receive(Message& message, Peer& peer) {
  auto has_tag = [&](const Unexpected& k) { return k.envelope.tag == message.envelope_.tag; };
  auto found = std::find_if(peer.unexpected.begin(), peer.unexpected.end(), has_tag);
  if (found == peer.unexpected.end()) {
    peer.receives.push_back(&message);
    ++outstanding_;
    return;
  }
  Unexpected received = std::move(*found);
  peer.unexpected.erase(found);
  peer.unexpected_bytes -= received.envelope.bytes;
  ++outstanding_;
  deliver(message, received.envelope, received.data.get());
}

void Messages::send_to_self(Message& message, Peer& peer) {
  const Envelope& envelope = message.envelope_;
  if (Message* receiver = take_receive(peer, envelope.tag)) {
    deliver(*receiver, envelope, message.data_);
  } else {
    Unexpected copy{envelope, std::make_unique_for_overwrite<std::byte[]>(envelope.bytes)};
    if (envelope.bytes) std::memcpy(copy.data.get(), message.data_, envelope.bytes);
    peer.unexpected.push_back(std::move(copy));
    peer.unexpected_bytes += envelope.bytes;
  }
  ++outstanding_;
  done(message, nullptr);
}

std::shared_ptr<Task> Messages::post(bool sends, int peer, const Envelope& envelope, void* data,
                                     const Waiting& waiting, std::shared_ptr<void> kept) {
  collect();
  auto task = std::make_shared<Posted>(*this, sends, peer, envelope, data, std::move(kept));
  Message& message = task->message;
  message.began_ = message.since_ = waiting.began;
  message.deadline_ = waiting.deadline;
  std::lock_guard lock(mutex_);
  finished_.reserve(finished_.size() + posted_ + 1);  // done() must not allocate
  message.task_ = task;
  ++posted_;
  try {
    start_locked(message, 1);
  } catch (...) {
    if (message.done()) return task;  // the task reports the error
    message.task_.reset();
    --posted_;
    throw;
  }
  if (message.done()) return task;
  if (is_idle_) changed_.notify_one();
  if (thread_.joinable()) return task;
  try {
    thread_ = start_thread([this] {
      name_this_thread("pc-messages");
      run();
    });
  } catch (const std::runtime_error&) {
    // Without a thread, the message moves while this rank waits for a message.
  }
  return task;
}

// Failing --------------------------------------------------------------------------------------

void Messages::throw_failure() {
  if (auto failure = group_->failure()) throw *failure;
  throw Failure(FailureKind::aborted, "the group has failed");
}

void Messages::fail_group(const Failure& failure) {
  group_->fail(failure);
  throw_failure();
}

Failure Messages::aborted(const std::string& why) const {
  return {FailureKind::aborted, group_->title(rank_) + " " + why, {rank_}};
}

template <class Move>
bool Messages::guarded(Move move) {
  if (failed_) return false;
  try {
    return move();
  } catch (const Failure& failure) {
    group_->fail(failure);  // `failure` may come from a larger group that this one is a part of
    fail_all(std::current_exception());
  } catch (...) {
    group_->fail(aborted("cannot move its messages"));
    fail_all(std::current_exception());
  }
  return false;
}

void Messages::fail_all(std::exception_ptr error) noexcept {
  failed_ = true;
  pipes_->withdraw();
  for (Peer& peer : peers_) {
    for (Message* message : peer.sends) done(*message, error);
    for (Message* message : peer.receives) done(*message, error);
    if (peer.receiving) done(*peer.receiving, error);
    peer.sends.clear();
    peer.receives.clear();
    peer.receiving = nullptr;
  }
}

void Messages::done(Message& message, std::exception_ptr error) noexcept {
  if (error && !message.task_) group_->endpoint(rank_).mark_reported();
  message.error_ = error;
  if (--outstanding_ == 0 && !announced_.empty()) {
    announced_.clear();
    group_->announce_message(rank_, announced_);
  }
  if (message.task_) {
    --posted_;
    message.task_->finish(error);
    finished_.push_back(std::move(message.task_));
    has_finished_.store(true, std::memory_order_relaxed);
  }
  if (sleepers_ > 0) pipes_->wake();  // one of the sleepers may wait for this message
  message.done_.store(true, std::memory_order_release);
}

// Moving ---------------------------------------------------------------------------------------

bool Messages::write_all() {
  return guarded([this] {
    bool moved = false;
    for (Peer& peer : peers_) moved = write(peer) || moved;
    return moved;
  });
}

bool Messages::read_all() {
  return guarded([this] {
    bool moved = false;
    for (int r = 0; r < group_->size(); ++r) {
      if (r != rank_) moved = read(r, peer(r)) || moved;
    }
    return moved;
  });
}

bool Messages::write(Peer& peer) {
  bool moved = false;
  while (!peer.sends.empty()) {
    Message& message = *peer.sends.front();
    moved = write(message) || moved;
    if (!message.begun_ || message.moved_ < message.envelope_.bytes) return moved;
    peer.sends.pop_front();
    done(message, nullptr);
  }
  return moved;
}

bool Messages::write(Message& message) {
  const std::size_t before = message.moved_, bytes = message.envelope_.bytes;
  bool moved = false;
  if (!message.begun_) {
    message.begun_ = moved =
        pipes_->try_begin(message.peer_, message.envelope_, message.data_, message.moved_);
    if (!moved) return false;
  }
  while (message.moved_ < bytes && message.moved_ - before < kPieceBytes) {
    std::size_t count =
        pipes_->try_write(message.peer_, message.data_ + message.moved_, bytes - message.moved_);
    if (count == 0) break;
    message.moved_ += count;
    moved = true;
  }
  return moved;
}

// Limits the memory of unexpected messages: reads no more of them unless a recv waits.
bool Messages::wants(const Peer& peer) {
  return peer.receiving || peer.receiving_unexpected || !peer.receives.empty() ||
         peer.unexpected_bytes <= kKeptMessageBytes;
}

bool Messages::read(int from, Peer& peer) {
  bool moved = false;
  // The limit ends the loop if the peer writes as fast as this rank reads.
  for (std::size_t received = 0; received < kPieceBytes; received += sizeof(Envelope)) {
    if (!peer.receiving && !peer.receiving_unexpected) {
      const Envelope* envelope = wants(peer) ? pipes_->try_next(from) : nullptr;
      if (!envelope) return moved;
      moved = true;
      begin_data(from, peer, *envelope);
    }
    const std::size_t bytes = peer.receiving ? peer.receiving->envelope_.bytes
                                             : peer.receiving_unexpected->envelope.bytes;
    std::byte* target =
        peer.receiving ? peer.receiving->data_ : peer.receiving_unexpected->data.get();
    while (peer.data_read < bytes) {
      std::size_t count = pipes_->try_read(from, target + peer.data_read, bytes - peer.data_read);
      if (count == 0) return moved;
      moved = true;
      received += count;
      peer.data_read += count;
      if (peer.receiving) peer.receiving->moved_ = peer.data_read;
      if (received >= kPieceBytes) break;
    }
    if (peer.data_read < bytes) break;
    pipes_->end(from);
    end_data(peer);
  }
  return moved;
}

Message* Messages::take_receive(Peer& peer, int tag) {
  auto has_tag = [&](const Message* message) { return message->envelope_.tag == tag; };
  auto found = std::find_if(peer.receives.begin(), peer.receives.end(), has_tag);
  if (found == peer.receives.end()) return nullptr;
  Message* message = *found;
  peer.receives.erase(found);
  return message;
}

void Messages::begin_data(int from, Peer& peer, const Envelope& envelope) {
  if (envelope.magic != Envelope::kMagic) {
    fail_group({FailureKind::peer_lost,
                group_->title(from) + " sent data that is no pycollective message to " +
                    group_->title(rank_),
                {from}});
  }
  peer.data_read = 0;
  peer.receiving = take_receive(peer, envelope.tag);
  if (peer.receiving) {
    compare(*peer.receiving, envelope);
    return;
  }
  try {
    peer.receiving_unexpected =
        Unexpected{envelope, std::make_unique_for_overwrite<std::byte[]>(envelope.bytes)};
  } catch (const std::bad_alloc&) {
    fail_group(aborted("has no memory for a message of " + std::to_string(envelope.bytes) +
                       " bytes from " + group_->title(from) +
                       " for which recv was not called yet"));
  }
}

void Messages::end_data(Peer& peer) {
  if (peer.receiving) {
    done(*std::exchange(peer.receiving, nullptr), nullptr);
    return;
  }
  Unexpected received = std::move(*peer.receiving_unexpected);
  peer.receiving_unexpected.reset();
  // recv may have been called while the message arrived.
  if (Message* message = take_receive(peer, received.envelope.tag)) {
    deliver(*message, received.envelope, received.data.get());
    return;
  }
  peer.unexpected_bytes += received.envelope.bytes;
  peer.unexpected.push_back(std::move(received));
}

void Messages::deliver(Message& message, const Envelope& envelope, const std::byte* data) {
  try {
    compare(message, envelope);
    if (envelope.bytes) std::memmove(message.data_, data, envelope.bytes);
    done(message, nullptr);
  } catch (...) {
    done(message, std::current_exception());
  }
}

// Sender and receiver must agree on type and shape.
void Messages::compare(const Message& message, const Envelope& envelope) {
  const Envelope& expected = message.envelope_;
  if (expected.bytes == envelope.bytes && expected.identity == envelope.identity) return;
  std::string me = group_->title(rank_), it = group_->title(message.peer_);
  std::vector<int> ranks{message.peer_, rank_};
  std::vector<std::string> calls{describe(true, rank_, envelope), describe(message)};
  if (rank_ < message.peer_) {
    std::swap(ranks[0], ranks[1]);
    std::swap(calls[0], calls[1]);
  } else if (rank_ == message.peer_) {  // a failure has one description for each rank
    ranks = {rank_};
    calls = {calls[0] + ", " + calls[1]};
  }
  fail_group({FailureKind::mismatch,
              me + " receives " + expected.describe() + " from " + it + " with tag " +
                  std::to_string(expected.tag) + ", but " + it + " sent " + envelope.describe() +
                  ": sender and receiver must agree on shape and dtype",
              std::move(ranks), std::move(calls)});
}

// Waiting --------------------------------------------------------------------------------------

std::string Messages::describe(bool sends, int peer, const Envelope& envelope) {
  return (sends ? "send (" : "recv (") + envelope.describe() + ", tag " +
         std::to_string(envelope.tag) + (sends ? ") to rank " : ") from rank ") +
         std::to_string(peer);
}

std::string Messages::describe(const Message& message) {
  return describe(message.sends_, message.peer_, message.envelope_);
}

void Messages::announce_waiting() {
  const Message* oldest = nullptr;
  auto consider = [&](const Message* message) {
    if (!oldest || message->began_ < oldest->began_) oldest = message;
  };
  for (const Peer& peer : peers_) {
    if (!peer.sends.empty()) consider(peer.sends.front());
    if (!peer.receives.empty()) consider(peer.receives.front());
    if (peer.receiving) consider(peer.receiving);
  }
  std::string text = oldest ? describe(*oldest) : "";
  if (text == announced_) return;
  announced_ = text;
  group_->announce_message(rank_, text);
}

// Checks for deadlines, the group's failure, and peers that have left.
void Messages::check_peers(Clock::time_point now) {
  if (now - last_check_ < kWaitSlice) return;
  last_check_ = now;
  for (int r = 0; r < group_->size(); ++r) {  // before read_all(), which gets their last messages
    peer(r).left = group_->has_left(r);
  }
  const bool wrote = write_all();
  const bool moved = read_all() || wrote;
  guarded([&] {
    announce_waiting();  // first, because the failure may name this message
    if (auto failure = group_->failure()) throw *failure;
    for_each([&](Message& message) { check_peers(message, now, moved); });
    return true;
  });
}

void Messages::check_peers(Message& message, Clock::time_point now, bool moved) {
  Peer& peer = this->peer(message.peer_);
  const auto me = [this] { return group_->title(rank_); };
  const auto it = [&] { return group_->title(message.peer_); };
  if (!moved && peer.left && message.peer_ != rank_) {
    fail_group({FailureKind::peer_lost,
                it() + " has left the group, while " + me() + " is in " + describe(message),
                {message.peer_},
                {describe(message)}});
  }
  // If the peer left or was lost, the reason arrives over another connection, within kEndedPipe.
  if (!moved && message.peer_ != rank_ && pipes_->has_ended(message.peer_)) {
    if (!peer.ended) peer.ended = now;
    if (now - *peer.ended >= kEndedPipe) {
      fail_group({FailureKind::peer_lost,
                  "the connection for messages between " + me() + " and " + it() +
                      " has ended, while " + me() + " is in " + describe(message),
                  {message.peer_},
                  {describe(message)}});
    }
  }
  if (now < message.deadline_) {
    warn(message, now);
    return;
  }
  fail_group({FailureKind::timeout,
              me() + " waited until its deadline in " + describe(message) + ". " +
                  group_->describe_ranks(),
              {message.peer_},
              {describe(message)}});
}

void Messages::warn(Message& message, Clock::time_point now) {
  if (message.deadline_ == Clock::time_point::max()) return;  // no thread waits for it yet
  if (std::exchange(message.last_moved_, message.moved_) != message.moved_) message.since_ = now;
  Clock::time_point deadline = message.since_ + (message.deadline_ - message.began_);
  if (message.warned_ || !is_long(warning_, message.since_, deadline, now)) return;
  message.warned_ = true;
  warnings_.push_back(group_->title(rank_) + " has waited " + in_seconds(now - message.since_) +
                      " in " + describe(message) + ": " + group_->describe(message.peer_) +
                      ". It gives up in " + in_seconds(message.deadline_ - now) + ".");
}

// A thread that sleeps between moving messages.
class Messages::PipesSleeper final : public Sleeper {
 public:
  explicit PipesSleeper(Messages& messages)
      : messages_(messages),
        limit_(messages.pipes_->spin_limit(messages.group_->is_oversubscribed())) {}

  SpinLimit spin_limit() override { return limit_; }

  void announce_sleep() override {
    seen_ = messages_.pipes_->announce_sleep();
    std::lock_guard lock(messages_.mutex_);
    ++messages_.sleepers_;
  }

  bool sleep(Clock::duration limit) override {
    std::vector<Interest> interests;
    {
      std::lock_guard lock(messages_.mutex_);
      for (const Peer& peer : messages_.peers_) {
        interests.push_back({wants(peer), !peer.sends.empty()});
      }
    }
    return messages_.pipes_->sleep(seen_, limit, interests);
  }

  void end_sleep() override {
    messages_.pipes_->end_sleep();
    std::lock_guard lock(messages_.mutex_);
    --messages_.sleepers_;
  }

  void extend_deadlines(Clock::duration missed) override {
    std::lock_guard lock(messages_.mutex_);
    messages_.for_each(
        [missed](Message& message) { message.deadline_ = later(message.deadline_, missed); });
  }

  void check_peers() override {
    std::vector<std::string> warnings;
    std::function<void(const std::string&)> tell;
    {
      std::lock_guard lock(messages_.mutex_);
      messages_.check_peers(Clock::now());
      warnings.swap(messages_.warnings_);
      if (!warnings.empty()) tell = messages_.warning_.tell;
    }
    for (const std::string& text : warnings) tell(text);
  }

 private:
  Messages& messages_;
  const SpinLimit limit_;
  std::uint32_t seen_ = 0;
};

template <class IsOver>
bool Messages::progress_until(IsOver is_over, Clock::time_point deadline,
                              const Interrupt& interrupt) {
  PipesSleeper sleeper(*this);
  auto poll = [&] {
    std::lock_guard lock(mutex_);
    const bool wrote = write_all();
    // Returns before reading when a send is done. The program's next call is likely to be the recv
    // for the next message, which then needs no copy.
    if (is_over()) return Progress::done;
    const bool moved = read_all() || wrote;
    return is_over() ? Progress::done : moved ? Progress::moved : Progress::blocked;
  };
  return Waiter(sleeper, poll, deadline, interrupt).wait();
}

void Messages::finish(Message& message, const Waiting& waiting) {
  try {
    Progressing progressing(*this);
    {
      std::lock_guard lock(mutex_);
      message.began_ = message.since_ = waiting.began;
      message.deadline_ = waiting.deadline;
    }
    progress_until([&] { return message.done(); }, Clock::time_point::max(), waiting.interrupt);
  } catch (...) {
    // The caller owns the memory again, so no thread may write into it any more.
    use_reserve();
    group_->fail(
        aborted("left a message because of an error of its own").with_call(describe(message)));
    std::lock_guard lock(mutex_);
    if (auto failure = group_->failure()) fail_all(std::make_exception_ptr(*failure));
    throw;
  }
  if (message.error_) std::rethrow_exception(message.error_);
}

void Messages::run() {
  auto idle_since = Clock::now();
  std::unique_lock lock(mutex_);
  while (!is_stopping_) {
    if (posted_ > 0 && progressing_.load() == 0) {
      lock.unlock();
      try {
        progress_until([this] { return is_stopping_ || posted_ == 0 || progressing_.load() > 0; },
                       Clock::time_point::max(), {});
      } catch (const std::exception& error) {
        group_->fail(aborted(std::string("cannot move its messages: ") + error.what()));
        lock.lock();
        fail_all(std::current_exception());
        lock.unlock();
      }
      lock.lock();
      idle_since = Clock::now();
    } else if (posted_ > 0 || Clock::now() - idle_since < kLinger) {
      changed_.wait_for(lock, stand_by(group_->is_oversubscribed()));
    } else {
      is_idle_ = true;
      changed_.wait(lock, [this] { return is_stopping_ || posted_ > 0; });
      is_idle_ = false;
    }
  }
}

void Messages::drain(const Interrupt& interrupt) {
  Progressing progressing(*this);
  progress_until([this] { return outstanding() == 0; }, Clock::time_point::max(), interrupt);
}

void Messages::collect() {
  if (!has_finished_.load(std::memory_order_relaxed)) return;
  std::vector<std::shared_ptr<Task>> finished;
  std::lock_guard lock(mutex_);
  finished.swap(finished_);
  has_finished_.store(false, std::memory_order_relaxed);
}

}  // namespace pycollective
