#include "transport/tcp.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "support/cores.h"
#include "support/origin.h"
#include "support/round_up.h"
#include "support/tuning.h"
#include "transport/sockets.h"
#include "transport/tcp_frame.h"
#include "transport/tcp_pipes.h"
#include "transport/tcp_stream.h"

namespace pycollective {
namespace {

using tcp::clean, tcp::Header, tcp::kCallText, tcp::kControlText, tcp::Kind, tcp::Stream;

// A connection that breaks says less than the control frame that may be on its way.
constexpr auto kGrace = std::chrono::milliseconds(300);
// A rank that never waits looks at its control connections this often.
constexpr auto kControlEvery = std::chrono::milliseconds(100);

// A rank that leaves waits so long for a frame of a rank of another host that leaves just now.
constexpr auto kLinger = std::chrono::milliseconds(50);

struct Peer {
  std::string name;     // "rank 1 (10.0.0.2)"
  std::string address;  // if it is not this rank's
  std::vector<Stream> streams;
  // A message that is being sent, or the rest of one.
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
  bool to_begin = false;  // parts are still to be put into streams
  bool sending = false;
  std::uint64_t parts_out = 0, parts_in = 0;
  std::uint64_t told = 0;            // the call whose description it was sent
  Clock::time_point broken_since{};  // of a stream of messages; zero: none is broken

  // Guarded by the member's mutex.
  Descriptor control;
  bool closed = false;  // nothing more comes over the control connection
  std::string control_out;
  std::vector<char> control_in;
  bool left = false;
  std::uint64_t calls = 0;       // when it left
  KnownCall heard{0, 0, ""};     // the last call of which a message came
  KnownCall waiting{0, 0, ""};   // the last that it said it is in
  KnownCall over{0, 0, ""};      // the last that it said it has finished, being in none
  std::string message;           // between two ranks, in which it waits
  KnownCalls told_of;            // all of its last calls, if it has said so
  Clock::time_point asked_at{};  // when this rank told it all of its own
  bool beats = false;
  Clock::time_point heard_at{};  // what came last over the control connection
};

std::string state_of(const Peer& peer) {
  if (peer.left) {
    return peer.name + " has left the group after " + std::to_string(peer.calls) + " calls";
  }
  std::string who = peer.name;
  if (!peer.message.empty()) who += " waits in " + peer.message + " and";
  std::uint64_t last = std::max(peer.waiting.number, peer.heard.number);
  if (peer.beats && peer.over.number >= last) {
    return who + (peer.over.number == 0 ? " had made no collective call when last heard of"
                                        : " was last heard of after " + peer.over.text);
  }
  if (peer.waiting.number > 0 && peer.waiting.number == last) {
    return who + " is in " + peer.waiting.text;
  }
  if (peer.heard.number == 0) {
    return who + (peer.message.empty() ? " has not been heard of yet"
                                       : " has been heard of in no collective call yet");
  }
  return who + " was last heard of in " + clean(peer.heard.text);
}

// What is known of a peer's calls.
KnownCalls calls_of(const Peer& peer) {
  KnownCalls calls = peer.told_of;
  for (const KnownCall* call : {&peer.heard, &peer.waiting, &peer.over}) {
    if (call->number > 0) calls.emplace_back(call->number, call->fingerprint, clean(call->text));
  }
  return calls;
}

// Calls as lines of a control frame, as many of the last ones as fit; and back.
std::string lines_of(const KnownCalls& calls) {
  std::string lines;
  for (const KnownCall& call : calls) {
    std::string line = std::to_string(call.number) + ' ' + std::to_string(call.fingerprint) + ' ' +
                       call.text.substr(0, kCallText) + '\n';
    if (lines.size() + line.size() > kControlText) break;
    lines += line;
  }
  return lines;
}

KnownCalls calls_in(std::string_view lines) {
  KnownCalls calls;
  for (std::size_t end; (end = lines.find('\n')) != std::string_view::npos;) {
    std::string_view line = lines.substr(0, end);
    std::uint64_t number = 0, fingerprint = 0;
    auto read = std::from_chars(line.data(), line.data() + line.size(), number);
    if (read.ec == std::errc() && read.ptr < line.data() + line.size()) {
      read = std::from_chars(read.ptr + 1, line.data() + line.size(), fingerprint);
      auto text = line.substr(static_cast<std::size_t>(read.ptr - line.data()));
      if (read.ec == std::errc() && text.size() > 1) {
        calls.emplace_back(number, fingerprint, clean(text.substr(1)));
      }
    }
    lines.remove_prefix(end + 1);
  }
  return calls;
}

}  // namespace

// This process's rank: its connections, and its endpoint.
class TcpGroup::Member final : public Endpoint {
 public:
  Member(TcpGroup& group, int rank, const std::vector<std::vector<int>>& streams, bool others)
      : group_(group), rank_(rank), size_(static_cast<int>(streams.size())) {
    if (rank < 0 || rank >= size_) throw std::invalid_argument("no such rank in the group");
    peers_.resize(streams.size());
    std::size_t most = 0;
    for (int r = 0; r < size_; ++r) {
      const auto& given = streams[static_cast<std::size_t>(r)];
      if (r == rank_ ? !given.empty() : given.size() < (others ? 1U : 2U)) {
        throw std::invalid_argument(
            "every peer needs a control connection and one or more for messages");
      }
      Peer& peer = peers_[static_cast<std::size_t>(r)];
      peer.name = "rank " + std::to_string(r);
      if (r == rank_) continue;
      peer.control = duplicate_socket(given[0]);
      peer.streams = std::vector<Stream>(given.size() - 1);
      for (std::size_t s = 1; s < given.size(); ++s) peer.streams[s - 1].open(given[s]);
      // The control connection may be a relay's (pycollective/rendezvous/relay.py).
      std::string there = address_of(given.back(), true);
      if (there.empty() || there == address_of(given.back(), false)) {
        ++here_;
      } else {
        peer.name += " (" + there + ")";
        peer.address = there;
      }
      most = std::max(most, peer.streams.size());
    }
    polled_.reserve(1 + peers_.size() * (1 + most));
  }

  int rank() const override { return rank_; }
  int size() const { return size_; }
  int here() const { return here_; }
  std::uint64_t moved() const override { return moved_; }

  // Endpoint -----------------------------------------------------------------------------------

  void enter(const CallRecord& call) override {
    if (busy_.exchange(true)) {
      std::lock_guard lock(mutex_);
      throw std::logic_error(
          closed_ ? "rank " + std::to_string(rank_) + " has left the group"
                  : "rank " + std::to_string(rank_) +
                        " is already in a collective call in another thread; a rank makes one "
                        "call at a time");
    }
    std::lock_guard lock(mutex_);
    history_.add(call);
    call_ = history_.last();
    fingerprint_ = call_.fingerprint;
    text_.clear();
    said_ = false;
  }

  void leave() noexcept override {
    if (unsent_ > 0) {  // after a failure: the memory is the caller's again
      for (Peer& peer : peers_) {
        peer.sending = peer.to_begin = false;
        for (Stream& stream : peer.streams) stream.stop_sending();
      }
      unsent_ = 0;
    }
    busy_.store(false);
  }

  bool try_send(int to, const void* data, std::size_t bytes) override {
    Peer& peer = at(to);
    if (peer.sending && !push(peer)) return false;
    peer.data = static_cast<const std::byte*>(data);
    peer.bytes = bytes;
    peer.to_begin = peer.sending = true;
    ++unsent_;
    push(peer);
    return true;
  }

  Piece try_receive(int from, std::size_t remaining) override {
    return try_receive_into(from, remaining, nullptr);
  }

  Piece try_receive_into(int from, std::size_t remaining, void* target) override {
    if (unsent_ > 0) progress();
    Peer& peer = at(from);
    Stream& stream = peer.streams[peer.parts_in % peer.streams.size()];
    if (!stream.whole()) fill(peer, stream, static_cast<std::byte*>(target), remaining);
    if (!stream.whole()) {
      wanted_ = &stream;
      if (stream.broken()) judge(peer);
      return {};
    }
    wanted_ = nullptr;
    const Header& header = stream.header();
    if (header.fingerprint != fingerprint_ || header.remaining != remaining) {
      mismatch(from);
    }
    return {stream.part(), header.bytes};
  }

  void release(int from) override {
    Peer& peer = at(from);
    peer.streams[peer.parts_in % peer.streams.size()].release();
    ++peer.parts_in;
  }

  void progress() override {
    if (unsent_ == 0) return;
    for (Peer& peer : peers_) {
      if (peer.sending) push(peer);
    }
  }

  // Written to the kernel, which delivers it also when this process ends.
  bool flushed() override { return unsent_ == 0; }
  bool flushed_to(int peer) override { return !at(peer).sending; }

  void check() override {
    auto now = Clock::now();
    if (now - control_read_ > kControlEvery) read_control();
    check_failure();
  }

  void fail(FailureKind kind, const std::string& message) noexcept override {
    if (!origin_.is_here()) return;  // a forked child does not speak for the rank
    std::lock_guard lock(mutex_);
    fail_locked(kind, message, true);
  }

  // Group --------------------------------------------------------------------------------------

  std::optional<Failure> failure() {
    if (!failed_.load()) read_control();
    std::lock_guard lock(mutex_);
    return failure_;
  }

  bool has_left(int rank) {
    if (!failed_.load()) read_control();
    std::lock_guard lock(mutex_);
    return at(rank).left;
  }

  const std::string& address(int rank) { return at(rank).address; }

  std::uint64_t calls(int rank) {
    std::lock_guard lock(mutex_);
    const Peer& peer = at(rank);
    if (rank == rank_) return call_.number;
    return std::max({peer.heard.number, peer.waiting.number, peer.over.number, peer.calls});
  }

  std::string describe(int rank) {
    if (rank != rank_ && !failed_.load() && origin_.is_here()) read_control();
    std::lock_guard lock(mutex_);
    if (rank != rank_) return state_of(at(rank));
    return describe_rank(rank, busy_.load() && !closed_, call_, message_);
  }

  void tell_message(const std::string& message) noexcept {
    if (!origin_.is_here()) return;
    std::lock_guard lock(mutex_);
    if (closed_ || message == message_) return;
    message_ = message;
    Header header;
    header.kind = Kind::in_message;
    tell_all(header, message);
  }

  void beat() {
    if (!origin_.is_here()) return;
    std::lock_guard lock(mutex_);
    if (closed_) return;
    auto now = Clock::now();
    if (!std::exchange(beats_, true)) {
      for (Peer& peer : peers_) peer.heard_at = now;
    }
    Header header;
    header.kind = busy_.load() ? Kind::in_call : Kind::idle;
    header.fingerprint = call_.fingerprint;
    header.call = call_.number;
    tell_all(header, call_.number ? call_.describe() : "");
  }

  std::vector<int> silent(double seconds) {
    std::vector<int> found;
    if (!origin_.is_here()) return found;
    read_control();  // what has come while nobody looked
    std::lock_guard lock(mutex_);
    auto since = Clock::now() - std::chrono::duration<double>(seconds);
    for (int r = 0; beats_ && r < size_; ++r) {
      if (r != rank_ && !at(r).left && at(r).heard_at < since) found.push_back(r);
    }
    return found;
  }

  void leave_group() noexcept {
    if (!origin_.is_here()) {
      close_all();
      return;
    }
    if (busy_.exchange(true)) {
      // Another thread is in a call: it is to end, and what it uses stays open until it has.
      std::lock_guard lock(mutex_);
      if (closed_ || failure_) return;
      std::string text =
          "rank " + std::to_string(rank_) + " has left the group in " + call_.describe();
      Header header;
      header.kind = Kind::failed;
      header.failure = static_cast<std::uint32_t>(FailureKind::peer_lost);  // to the others
      tell_all(header, text);
      fail_locked(FailureKind::aborted, text, false);
      return;
    }
    std::unique_lock lock(mutex_);
    if (closed_) return;
    Header header;
    if (failure_) {  // a peer may hear of this end before it hears the reason from whom it began
      header.kind = Kind::failed;
      header.failure = static_cast<std::uint32_t>(failure_->kind);
      tell_all(header, failure_->what());
    } else {
      header.kind = Kind::left;
      header.call = call_.number;
      tell_all(header, lines_of(known_calls(history_)));
      compare_at_end();
    }
    for (Peer& peer : peers_) {
      if (peer.control.get() < 0) continue;
      shutdown(peer.control.get(), SHUT_WR);
      // Closing a socket with unread data resets it, and what was sent may be lost with that.
      char rest[1024];
      for (int i = 0; i < 64 && recv(peer.control.get(), rest, sizeof rest, MSG_DONTWAIT) > 0;) ++i;
    }
    close_all();
  }

  // Stays busy for ever, so that no call begins.
  void close_all() noexcept {
    closed_ = true;
    busy_.store(true);
    for (Peer& peer : peers_) {
      peer.control.close();
      for (Stream& stream : peer.streams) stream.close();
    }
    wake_.close();
  }

  // Sleeper ------------------------------------------------------------------------------------

  SpinLimit spin_limit() override { return socket_spin_limit(crowded(here_)); }
  bool has_failed() override { return failed_.load(); }

  void look_up() override {
    read_control();
    say_what_i_call();
  }

  // Until a connection has something, or another thread has failed the group.
  bool sleep(Clock::duration limit) override {
    polled_.clear();
    polled_.push_back({wake_.descriptor(), POLLIN, 0});
    bool broken = false;
    for (Peer& peer : peers_) {
      if (peer.control.get() >= 0 && !peer.closed) {
        polled_.push_back({peer.control.get(), POLLIN, 0});
      }
    }
    const auto control = polled_.size();
    for (Peer& peer : peers_) {
      broken = broken || peer.broken_since != Clock::time_point{};
      for (Stream& stream : peer.streams) {
        int events = (&stream == wanted_ ? POLLIN : 0) | (stream.sending() ? POLLOUT : 0);
        if (!events || stream.broken()) continue;
        polled_.push_back({stream.descriptor(), static_cast<short>(events), 0});
      }
    }
    auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(limit).count() + 1;
    if (broken) ms = std::min<decltype(ms)>(ms, 10);
    int ready = poll(polled_.data(), static_cast<nfds_t>(polled_.size()), static_cast<int>(ms));
    if (ready > 0 && polled_[0].revents) wake_.drain();
    auto is_ready = [](const pollfd& one) { return one.revents != 0; };
    if (ready > 0 && std::any_of(polled_.begin(), polled_.begin() + control, is_ready)) {
      read_control();
    }
    return ready >= 0;
  }

  void say_what_i_call() {
    peek();
    if (std::exchange(said_, true)) return;
    Header header;
    header.kind = Kind::in_call;
    header.fingerprint = fingerprint_;
    header.call = call_.number;
    std::lock_guard lock(mutex_);
    tell_all(header, call_.describe());
  }

  void read_control() {
    if (!origin_.is_here()) return;  // what comes is for the parent
    std::lock_guard lock(mutex_);
    read_frames();
    if (busy_.load() && !failed_.load()) judge_calls();
  }

 private:
  Group& group() override { return group_; }

  // With the mutex held, as the next ones.
  void read_frames() {
    control_read_ = Clock::now();
    if (closed_) return;
    control_polled_.clear();
    for (Peer& peer : peers_) {
      if (!peer.control_out.empty()) write_control(peer);
      bool open = peer.control.get() >= 0 && !peer.closed;
      control_polled_.push_back({open ? peer.control.get() : -1, POLLIN, 0});
    }
    int ready = poll(control_polled_.data(), static_cast<nfds_t>(control_polled_.size()), 0);
    for (std::size_t p = 0; ready > 0 && p < peers_.size(); ++p) {
      if (control_polled_[p].revents) read_control_of(peers_[p]);
    }
  }

  // What the peers have said of their calls, against this rank's.
  void judge_calls() {
    for (int r = 0; r < size_; ++r) {
      Peer& peer = at(r);
      // This rank may be done with a call in which the peer waits in vain.
      if (differs(peer)) {
        fail_mismatch(r);
      } else if (peer.left && peer.calls < call_.number) {
        fail_locked(
            FailureKind::peer_lost,
            state_of(peer) + ", while rank " + std::to_string(rank_) + " is in " + call_.describe(),
            true);
      }
    }
  }

  // Whether calls of the peer are known that this rank has made differently.
  bool differs(const Peer& peer) const {
    auto differ = [this](const KnownCall& call) {
      return history_.has(call.number) && history_.fingerprint_of(call.number) != call.fingerprint;
    };
    return differ(peer.heard) || differ(peer.waiting) || differ(peer.over) ||
           std::any_of(peer.told_of.begin(), peer.told_of.end(), differ);
  }

  // Fails the group, because a peer's calls differ from this rank's. Where the
  // first that differ are not known, the peer, which knows its own, has some time to say.
  void fail_mismatch(int r) {
    Peer& peer = at(r);
    KnownCalls mine = known_calls(history_), theirs = calls_of(peer);
    Difference found = find_difference(mine, theirs);
    if (!found.is_first && peer.told_of.empty() && !peer.left) {
      auto now = Clock::now();
      if (peer.asked_at == Clock::time_point{}) {
        peer.asked_at = now;
        Header header;
        header.kind = Kind::calls;
        header.call = call_.number;
        tell(peer, header, lines_of(mine));
      }
      if (now - peer.asked_at < kGrace) return;
    }
    fail_locked(FailureKind::mismatch, describe_mismatch(rank_, mine, r, theirs), true);
  }

  // Of a rank that has said that it leaves.
  void compare_at_end() {
    auto waits_for = [](const Peer& peer) {
      return peer.control.get() >= 0 && !peer.closed && !peer.left && !peer.address.empty();
    };
    auto until = Clock::now() + kLinger;
    for (;;) {
      read_frames();
      bool wait = !failed_.load() && std::any_of(peers_.begin(), peers_.end(), waits_for);
      if (!wait || Clock::now() >= until) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    for (int r = 0; r < size_ && !failed_.load(); ++r) {
      if (!differs(at(r))) continue;
      fail_locked(FailureKind::mismatch,
                  describe_mismatch(rank_, known_calls(history_), r, calls_of(at(r))), true);
    }
  }

  Peer& at(int rank) { return peers_[static_cast<std::size_t>(rank)]; }

  void check_failure() {
    if (!failed_.load(std::memory_order_relaxed)) return;
    std::lock_guard lock(mutex_);
    throw *failure_;
  }

  // Sending ------------------------------------------------------------------------------------

  // Writes what there is room for; true when nothing is left to send to this peer.
  bool push(Peer& peer) {
    std::size_t count = peer.streams.size();
    // The peer may read as fast as this rank writes.
    const std::uint64_t most = moved_ + kPieceBytes / kTcpPartBytes;
    for (bool more = true; more && moved_ < most;) {
      more = false;
      while (peer.to_begin && !peer.streams[peer.parts_out % count].sending()) {
        begin_part(peer, peer.streams[peer.parts_out % count]);
        more = true;
      }
      bool sending = peer.to_begin;
      for (Stream& stream : peer.streams) {
        if (!stream.sending()) continue;
        if (!write(peer, stream))
          sending = true;
        else if (peer.to_begin)
          more = true;
      }
      if (!sending && !peer.to_begin) {
        peer.sending = false;
        --unsent_;
        return true;
      }
    }
    return false;
  }

  void begin_part(Peer& peer, Stream& stream) {
    Header header;
    header.kind = Kind::message;
    header.fingerprint = fingerprint_;
    header.call = call_.number;
    header.remaining = peer.bytes;
    std::size_t part = std::min(peer.bytes, kTcpPartBytes);
    header.bytes = static_cast<std::uint32_t>(part);
    const std::string& text = my_text();
    // The first message of the call says what the call is.
    if (std::exchange(peer.told, call_.number) != call_.number) {
      header.text = static_cast<std::uint32_t>(text.size());
    }
    stream.begin(header, text, peer.data);
    if (part) peer.data += part;
    peer.bytes -= part;
    peer.to_begin = peer.bytes > 0;
    ++peer.parts_out;
  }

  // This rank's call in words, filled up with spaces so that what follows is aligned.
  const std::string& my_text() {
    if (text_.empty()) {
      text_ = call_.describe();
      text_.resize(std::min(round_up(text_.size(), kCacheLine), kCallText), ' ');
    }
    return text_;
  }

  // True when the stream's part is all written.
  bool write(Peer& peer, Stream& stream) {
    if (stream.broken()) {
      judge(peer);
      return false;
    }
    bool done = stream.write(moved_);
    if (stream.broken()) broke(peer);
    return done;
  }

  // Receiving ----------------------------------------------------------------------------------

  void fill(Peer& peer, Stream& stream, std::byte* target, std::size_t remaining) {
    bool was_broken = stream.broken();
    Stream::Read read;
    while ((read = stream.read(moved_)) == Stream::Read::header) {
      const Header header = stream.header();  // a copy: what accept() makes room for may move it
      if (const char* wrong = tcp::wrong_with_message(header)) not_a_member(peer, wrong);
      stream.accept();
      bool awaited = header.fingerprint == fingerprint_ && header.remaining == remaining;
      if (target && awaited) stream.aim(target);
    }
    if (read == Stream::Read::whole) {
      heard(peer, stream.header(), stream.text());
    } else if (stream.broken() && !was_broken) {
      broke(peer);
    }
  }

  void heard(Peer& peer, const Header& header, std::string text) {
    if (header.text == 0) return;
    std::lock_guard lock(mutex_);
    peer.heard = {header.call, header.fingerprint, std::move(text)};
  }

  // A message that this call does not receive may show that its sender made another call.
  void peek() {
    for (Peer& peer : peers_) {
      if (peer.streams.empty()) continue;
      Header header;
      std::string text;
      if (peer.streams[peer.parts_in % peer.streams.size()].peek(header, text)) {
        heard(peer, header, std::move(text));
      }
    }
  }

  void not_a_member(const Peer& peer, const char* wrong) {
    fail(FailureKind::peer_lost,
         peer.name + " sent " + wrong + " to rank " + std::to_string(rank_));
    check_failure();
  }

  // A broken connection: the control connection says why, if anything does.
  void broke(Peer& peer) {
    if (peer.broken_since == Clock::time_point{}) peer.broken_since = Clock::now();
    judge(peer);
  }

  void judge(Peer& peer) {
    read_control();
    check_failure();
    if (Clock::now() - peer.broken_since < kGrace) return;
    std::lock_guard lock(mutex_);
    fail_locked(FailureKind::peer_lost, lost_text(peer, "its connection broke"), true);
    throw *failure_;
  }

  // Failing ------------------------------------------------------------------------------------

  // A message of a peer is none that this rank expects.
  [[noreturn]] void mismatch(int from) {
    for (;;) {
      {
        std::lock_guard lock(mutex_);
        if (!failure_) fail_mismatch(from);
      }
      check_failure();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      read_control();
    }
  }

  // Control frames -----------------------------------------------------------------------------

  void tell_all(const Header& header, const std::string& text) noexcept {
    for (Peer& peer : peers_) tell(peer, header, text);
  }

  // With the mutex held. A peer that does not read gets no more than a failure and a leave.
  void tell(Peer& peer, Header header, const std::string& text) noexcept {
    if (peer.control.get() < 0 || peer.closed) return;
    bool optional = header.kind == Kind::in_call || header.kind == Kind::idle ||
                    header.kind == Kind::in_message;
    if (optional && !peer.control_out.empty()) return;
    header.text = static_cast<std::uint32_t>(std::min(text.size(), kControlText));
    peer.control_out.append(reinterpret_cast<const char*>(&header), sizeof header);
    peer.control_out.append(text, 0, header.text);
    write_control(peer);
  }

  void write_control(Peer& peer) noexcept {
    while (!peer.control_out.empty()) {
      ssize_t sent =
          send(peer.control.get(), peer.control_out.data(), peer.control_out.size(), kSendFlags);
      if (sent < 0 && errno == EINTR) continue;
      Io io = outcome(sent);
      if (io == Io::ended) peer.control_out.clear();  // reading says what happened
      if (io != Io::moved) return;
      peer.control_out.erase(0, static_cast<std::size_t>(sent));
    }
  }

  void read_control_of(Peer& peer) {
    bool ended = false;
    // Bounded, so that a peer cannot keep this rank here.
    for (int reads = 0; reads < 64 && !ended; ++reads) {
      char bytes[sizeof(Header) + kControlText];
      ssize_t got = recv(peer.control.get(), bytes, sizeof bytes, MSG_DONTWAIT);
      if (got < 0 && errno == EINTR) continue;
      Io io = outcome(got);
      if (io == Io::blocked) break;
      if (io == Io::moved) {
        peer.control_in.insert(peer.control_in.end(), bytes, bytes + got);
        peer.heard_at = Clock::now();
      }
      ended = io == Io::ended;
      if (!take_control_frames(peer)) return;
    }
    if (!ended) return;
    peer.closed = true;
    if (!peer.left) {
      fail_locked(FailureKind::peer_lost, lost_text(peer, "it ended, or its connection broke"),
                  true);
    }
  }

  // False when the peer sends what it must not.
  bool take_control_frames(Peer& peer) {
    std::size_t done = 0;
    while (peer.control_in.size() - done >= sizeof(Header)) {
      Header header;
      std::memcpy(&header, peer.control_in.data() + done, sizeof header);
      if (!tcp::is_control(header)) {
        peer.closed = true;
        fail_locked(FailureKind::peer_lost, lost_text(peer, "it sent a control frame that is none"),
                    true);
        return false;
      }
      if (peer.control_in.size() - done < sizeof header + header.text) break;
      std::string_view raw(peer.control_in.data() + done + sizeof header, header.text);
      std::string text = clean(raw);
      if (header.kind == Kind::left || header.kind == Kind::calls) peer.told_of = calls_in(raw);
      done += sizeof header + header.text;
      if (header.kind == Kind::in_call) {
        peer.waiting = {header.call, header.fingerprint, text};
      } else if (header.kind == Kind::idle) {
        peer.over = {header.call, header.fingerprint, text};
        peer.beats = true;
      } else if (header.kind == Kind::failed) {
        fail_locked(static_cast<FailureKind>(header.failure), text, false);
      } else if (header.kind == Kind::in_message) {
        peer.message = text;
      } else if (header.kind == Kind::left) {
        peer.left = true;
        peer.calls = header.call;
      } else if (differs(peer)) {
        auto place = static_cast<int>(&peer - peers_.data());
        fail_locked(FailureKind::mismatch,
                    describe_mismatch(rank_, known_calls(history_), place, calls_of(peer)), true);
      }
    }
    peer.control_in.erase(peer.control_in.begin(),
                          peer.control_in.begin() + static_cast<std::ptrdiff_t>(done));
    return true;
  }

  std::string lost_text(const Peer& peer, const char* how) const {
    std::string text = peer.name + " is lost to rank " + std::to_string(rank_) + ": " + how;
    if (busy_.load() && !closed_) text += ", while this rank is in " + call_.describe();
    return text;
  }

  void fail_locked(FailureKind kind, const std::string& message, bool tell_others) noexcept {
    if (failure_ || closed_) return;
    failure_.emplace(kind, message);
    failed_.store(true);
    if (tell_others) {
      Header header;
      header.kind = Kind::failed;
      header.failure = static_cast<std::uint32_t>(kind);
      tell_all(header, message);
    }
    wake_.wake();
  }

  TcpGroup& group_;
  const int rank_, size_;
  const Origin origin_;
  int here_ = 1;  // ranks at this rank's address
  std::vector<Peer> peers_;
  WakePipe wake_;  // another thread has failed the group

  // Of the thread that is in a call.
  std::atomic<bool> busy_{false};
  std::uint64_t fingerprint_ = 0;
  std::string text_;
  bool said_ = false;  // to the others, what this call is
  int unsent_ = 0;     // peers with something to send
  std::uint64_t moved_ = 0;
  const Stream* wanted_ = nullptr;  // on which the next part is to come
  std::vector<pollfd> polled_;

  mutable std::mutex mutex_;  // guards what follows, and the control side of the peers
  CallHistory history_;       // written by the thread in a call, which reads it without
  CallRecord call_;           // the last of them
  std::string message_;       // between two ranks, in which this one waits
  Clock::time_point control_read_{};
  std::vector<pollfd> control_polled_;
  bool beats_ = false;
  std::optional<Failure> failure_;
  std::atomic<bool> failed_{false};
  bool closed_ = false;
};

TcpGroup::TcpGroup(int rank, const std::vector<std::vector<int>>& streams,
                   const std::vector<int>& pipes, bool others)
    : member_(std::make_unique<Member>(*this, rank, streams, others)) {
  if (pipes.empty()) return;
  if (pipes.size() != streams.size()) throw std::invalid_argument("one pipe for each rank");
  std::vector<Descriptor> copies;
  for (int r = 0; r < size(); ++r) {
    copies.push_back(r == rank ? Descriptor()
                               : duplicate_socket(pipes[static_cast<std::size_t>(r)]));
  }
  pipes_ = std::make_shared<TcpPipes>(std::move(copies));
}

TcpGroup::~TcpGroup() { member_->leave_group(); }

int TcpGroup::rank() const { return member_->rank(); }
int TcpGroup::size() const { return member_->size(); }
void TcpGroup::leave(int) noexcept {
  member_->leave_group();
  pipes_.reset();
}
void TcpGroup::abandon() noexcept {
  member_->close_all();
  pipes_.reset();
}

Endpoint& TcpGroup::endpoint(int rank) {
  if (rank != member_->rank()) throw std::logic_error("this process has another rank of the group");
  return *member_;
}

void TcpGroup::fail(FailureKind kind, const std::string& message) noexcept {
  member_->fail(kind, message);
}

std::shared_ptr<Pipes> TcpGroup::pipes(int rank) {
  endpoint(rank);
  if (!pipes_) throw std::logic_error("this group has no connections for messages of two ranks");
  return pipes_;
}

bool TcpGroup::has_left(int rank) const { return member_->has_left(rank); }

std::optional<Failure> TcpGroup::failure() const { return member_->failure(); }

std::string TcpGroup::address(int rank) const { return member_->address(rank); }

std::uint64_t TcpGroup::calls(int rank) const { return member_->calls(rank); }

void TcpGroup::beat() { member_->beat(); }

std::vector<int> TcpGroup::silent(double seconds) { return member_->silent(seconds); }

std::string TcpGroup::describe(int rank) const { return member_->describe(rank); }

void TcpGroup::tell_message(int, const std::string& message) noexcept {
  member_->tell_message(message);
}

std::vector<int> TcpGroup::hosts() const {
  std::vector<int> hosts(static_cast<std::size_t>(size()));
  std::iota(hosts.begin(), hosts.end(), 0);
  return hosts;
}

bool TcpGroup::in_crowd() const { return crowded(member_->here()); }
int TcpGroup::here() const { return member_->here(); }

}  // namespace pycollective
