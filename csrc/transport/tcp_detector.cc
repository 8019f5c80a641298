#include "transport/tcp_detector.h"

#include <algorithm>
#include <charconv>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <utility>

namespace pycollective::tcp {
namespace {

// After a connection broke, a rank waits this long for a control frame with the reason.
constexpr auto kGrace = std::chrono::milliseconds(300);
// Interval at which a rank that never waits receives control frames.
constexpr auto kControlEvery = std::chrono::milliseconds(100);
// A rank that leaves waits this long for the leave frames of ranks on other hosts, to compare
// calls.
constexpr auto kLinger = std::chrono::milliseconds(50);

// Converts calls to the text of a control frame, one line each, as many of the last calls as fit.
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

FailureDetector::FailureDetector(int rank, const std::vector<std::vector<int>>& streams)
    : rank_(rank), peers_(streams.size()) {
  for (int r = 0; r < size(); ++r) {
    Peer& peer = at(r);
    peer.title = "rank " + std::to_string(r);
    if (r == rank_) continue;
    const auto& given = streams[static_cast<std::size_t>(r)];
    peer.control.open(given.front());
    // Not the control connection, which may end at a relay (pycollective/launch/relay.py).
    std::string there = address_of(given.back(), true);
    if (there.empty() || there == address_of(given.back(), false)) {
      ++here_;
    } else {
      peer.title += " (" + there + ")";
      peer.address = there;
    }
  }
}

// This rank's calls ----------------------------------------------------------------------------

void FailureDetector::enter(const CallRecord& call) {
  if (in_call_.exchange(true)) {
    std::lock_guard lock(mutex_);
    const std::string me = "rank " + std::to_string(rank_);
    if (closed_) throw Failure(FailureKind::aborted, me + " has left the group", {rank_});
    throw std::logic_error(me +
                           " is already in a collective call in another thread; a rank makes one "
                           "call at a time");
  }
  std::lock_guard lock(mutex_);
  history_.add(call);
  call_ = history_.last();
  announced_ = false;
}

void FailureDetector::announce_call() {
  if (std::exchange(announced_, true)) return;
  Header header;
  header.kind = Kind::in_call;
  header.fingerprint = call_.fingerprint;
  header.call = call_.number;
  std::lock_guard lock(mutex_);
  send_to_all(header, call_.describe());
}

// Failures -------------------------------------------------------------------------------------

std::optional<Failure> FailureDetector::failure() {
  if (!origin_.is_here()) return {};  // a thread of the parent may have held the mutex
  if (!has_failed()) receive();
  std::lock_guard lock(mutex_);
  return failure_;
}

void FailureDetector::check() {
  if (!failed_.load(std::memory_order_relaxed)) return;
  std::lock_guard lock(mutex_);
  throw *failure_;
}

void FailureDetector::check_now() {
  if (Clock::now() - received_at_.load() > kControlEvery) receive();
  check();
}

void FailureDetector::fail(const Failure& failure) noexcept {
  if (!origin_.is_here()) return;  // a forked child is not the rank
  std::lock_guard lock(mutex_);
  fail_locked(failure, true);
}

void FailureDetector::fail_mismatch(int peer) {
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      if (!failure_) fail_differing(peer);
    }
    check();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    receive();
  }
}

void FailureDetector::check_broken(int peer, Clock::time_point since) {
  receive();
  check();
  if (Clock::now() - since < kGrace) return;
  std::lock_guard lock(mutex_);
  const Failure failure = loss_of(peer, "its connection broke");
  fail_locked(failure, true);
  throw failure_ ? *failure_ : failure;
}

void FailureDetector::record_call(int peer, KnownCall call) {
  std::lock_guard lock(mutex_);
  at(peer).from_message = std::move(call);
}

void FailureDetector::receive() {
  if (!origin_.is_here()) return;  // the frames are for the parent
  std::lock_guard lock(mutex_);
  receive_frames();
  if (in_call_.load() && !has_failed()) compare_calls();
}

void FailureDetector::add_polled(std::vector<pollfd>& polled) const {
  polled.push_back({wake_.descriptor(), POLLIN, 0});
  std::lock_guard lock(mutex_);
  for (const Peer& peer : peers_) {
    polled.push_back({peer.control.is_open() ? peer.control.descriptor() : -1, POLLIN, 0});
  }
}

bool FailureDetector::is_ready(const std::vector<pollfd>& polled) {
  if (polled[0].revents) wake_.drain();
  auto ready = [](const pollfd& one) { return one.revents != 0; };
  return std::any_of(polled.begin(), polled.begin() + 1 + size(), ready);
}

// For the group ---------------------------------------------------------------------------------

bool FailureDetector::has_left(int peer) {
  if (!has_failed()) receive();
  std::lock_guard lock(mutex_);
  return at(peer).left;
}

std::uint64_t FailureDetector::calls(int rank) const {
  std::lock_guard lock(mutex_);
  const Peer& peer = at(rank);
  if (rank == rank_) return call_.number;
  return std::max({peer.from_message.number, peer.waiting.number, peer.over.number, peer.calls});
}

std::string FailureDetector::title(int rank) const {
  std::lock_guard lock(mutex_);
  return at(rank).title;
}

void FailureDetector::set_titles(const std::vector<std::string>& titles) {
  std::lock_guard lock(mutex_);
  for (std::size_t r = 0; r < peers_.size(); ++r) peers_[r].title = titles.at(r);
}

std::string FailureDetector::describe(int rank) {
  if (rank != rank_ && !has_failed() && origin_.is_here()) receive();
  std::lock_guard lock(mutex_);
  if (rank != rank_) return describe_peer(at(rank));
  return describe_rank(at(rank).title, in_call_.load() && !closed_, call_, message_);
}

void FailureDetector::set_describe(std::function<std::string(int)> describe) {
  std::lock_guard lock(mutex_);
  describe_elsewhere_ = std::move(describe);
}

void FailureDetector::announce_message(const std::string& message) noexcept {
  if (!origin_.is_here()) return;
  std::lock_guard lock(mutex_);
  if (closed_ || message == message_) return;
  message_ = message;
  Header header;
  header.kind = Kind::in_message;
  send_to_all(header, message);
}

void FailureDetector::wake(int peer) noexcept {
  if (!origin_.is_here()) return;
  Header header;
  header.kind = Kind::wake_up;
  std::lock_guard lock(mutex_);
  if (!closed_) at(peer).control.send(header, "");
}

void FailureDetector::send_heartbeat() {
  if (!origin_.is_here()) return;
  std::lock_guard lock(mutex_);
  if (closed_) return;
  auto now = Clock::now();
  if (!std::exchange(sends_heartbeats_, true)) {
    for (Peer& peer : peers_) peer.received_at = now;
  }
  Header header;
  header.kind = in_call_.load() ? Kind::in_call : Kind::idle;
  header.fingerprint = call_.fingerprint;
  header.call = call_.number;
  send_to_all(header, call_.number ? call_.describe() : "");
}

std::vector<int> FailureDetector::silent(double seconds) {
  std::vector<int> found;
  if (!origin_.is_here()) return found;
  receive();
  std::lock_guard lock(mutex_);
  auto since = Clock::now() - std::chrono::duration<double>(seconds);
  for (int r = 0; sends_heartbeats_ && r < size(); ++r) {
    if (r != rank_ && !at(r).left && at(r).received_at < since) found.push_back(r);
  }
  return found;
}

bool FailureDetector::leave() noexcept {
  if (!origin_.is_here()) {
    close();
    return true;
  }
  if (in_call_.exchange(true)) {
    // Another thread is in a call. The call must end before the connections are closed.
    std::lock_guard lock(mutex_);
    if (closed_ || failure_) return false;
    Failure failure(FailureKind::aborted,
                    at(rank_).title + " has left the group in " + call_.describe(), {rank_},
                    {call_.describe()});
    failure.kind_for_peers = FailureKind::peer_lost;
    fail_locked(failure, true);
    return false;
  }
  std::lock_guard lock(mutex_);
  if (closed_) return false;
  if (failure_) {
    send_failure();  // the end of this connection may reach a peer before another rank's reason
  } else {
    Header header;
    header.kind = Kind::left;
    header.call = call_.number;
    send_to_all(header, lines_of(known_calls(history_)));
    compare_at_end();
  }
  for (Peer& peer : peers_) peer.control.shut_down();
  close();
  return true;
}

void FailureDetector::close() noexcept {
  closed_ = true;
  in_call_.store(true);  // enter() throws from now on
  for (Peer& peer : peers_) peer.control.close();
  wake_.close();
}

std::string FailureDetector::describe_peer(const Peer& peer) {
  if (peer.left) {
    return peer.title + " has left the group after " + std::to_string(peer.calls) +
           (peer.calls == 1 ? " call" : " calls");
  }
  std::string who = peer.title;
  if (!peer.message.empty()) who += " waits in " + peer.message + " and";
  std::uint64_t last = std::max(peer.waiting.number, peer.from_message.number);
  if (peer.sends_heartbeats && peer.over.number >= last) {
    return who + (peer.over.number == 0
                      ? " had made no collective call at its last heartbeat"
                      : " had finished " + peer.over.text + " at its last heartbeat");
  }
  if (peer.waiting.number > 0 && peer.waiting.number == last) {
    return who + " is in " + peer.waiting.text;
  }
  if (peer.from_message.number == 0) {
    return who + (peer.message.empty() ? " has sent nothing yet"
                                       : " has announced no collective call yet");
  }
  return who + " sent its last message in " + clean(peer.from_message.text);
}

KnownCalls FailureDetector::calls_of(const Peer& peer) {
  KnownCalls calls = peer.sent_calls;
  for (const KnownCall* call : {&peer.from_message, &peer.waiting, &peer.over}) {
    if (call->number > 0) calls.emplace_back(call->number, call->fingerprint, clean(call->text));
  }
  return calls;
}

Failure FailureDetector::loss_of(int rank, const char* how) const {
  std::string text = at(rank).title + " is lost to " + at(rank_).title + ": " + how;
  std::vector<std::string> calls;
  if (in_call_.load() && !closed_) {
    calls.push_back(call_.describe());
  } else if (!message_.empty()) {
    calls.push_back(message_);
  }
  if (!calls.empty()) text += ", while this rank is in " + calls[0];
  const std::string known = describe_elsewhere_ ? describe_elsewhere_(rank) : "";
  text += "; " + (known.empty() ? describe_peer(at(rank)) : known);
  return {FailureKind::peer_lost, text, {rank}, std::move(calls)};
}

Failure FailureDetector::mismatch_with(int rank, const KnownCalls& theirs) const {
  return mismatch_failure({rank_, at(rank_).title}, known_calls(history_), {rank, at(rank).title},
                          theirs);
}

std::vector<std::string> FailureDetector::addresses() const {
  std::vector<std::string> found;
  for (const Peer& peer : peers_) found.push_back(peer.address);
  return found;
}

// With the mutex held --------------------------------------------------------------------------

void FailureDetector::send_to_all(const Header& header, const std::string& text) noexcept {
  for (Peer& peer : peers_) peer.control.send(header, text);
}

void FailureDetector::receive_frames() {
  received_at_ = Clock::now();
  if (closed_) return;
  polled_.clear();
  for (Peer& peer : peers_) {
    peer.control.flush();
    polled_.push_back({peer.control.is_open() ? peer.control.descriptor() : -1, POLLIN, 0});
  }
  int ready = poll(polled_.data(), static_cast<nfds_t>(polled_.size()), 0);
  for (int r = 0; ready > 0 && r < size(); ++r) {
    if (polled_[static_cast<std::size_t>(r)].revents) receive_from(r);
  }
}

void FailureDetector::receive_from(int rank) {
  Peer& peer = at(rank);
  const Io io = peer.control.receive();
  if (io == Io::moved) peer.received_at = Clock::now();
  bool is_good = true;
  while (auto frame = peer.control.next()) {
    is_good = handle(rank, *frame);
    if (!is_good) break;
  }
  if (!is_good || peer.control.is_broken()) {
    peer.control.end();
    fail_locked(loss_of(rank, "it sent an invalid control frame"), true);
  } else if (io == Io::ended) {
    peer.control.end();
    if (peer.left) return;
    fail_locked(loss_of(rank, "it ended, or its connection broke"), true);
  }
}

bool FailureDetector::handle(int rank, const ControlFrame& frame) {
  if (frame.header.kind == Kind::wake_up) return true;
  Peer& peer = at(rank);
  const Header& header = frame.header;
  std::string text = clean(frame.text);
  if (header.kind == Kind::left || header.kind == Kind::calls) {
    peer.sent_calls = calls_in(frame.text);
  }
  if (header.kind == Kind::in_call) {
    peer.waiting = {header.call, header.fingerprint, text};
  } else if (header.kind == Kind::idle) {
    peer.over = {header.call, header.fingerprint, text};
    peer.sends_heartbeats = true;
  } else if (header.kind == Kind::failed) {
    const std::optional<Failure> failure = failure_in(frame.text, size());
    if (!failure) return false;
    fail_locked(*failure, false);
  } else if (header.kind == Kind::in_message) {
    peer.message = text;
  } else if (header.kind == Kind::left) {
    peer.left = true;
    peer.calls = header.call;
  } else if (differs(peer)) {
    fail_locked(mismatch_with(rank, calls_of(peer)), true);
  }
  return true;
}

void FailureDetector::compare_calls() {
  for (int r = 0; r < size(); ++r) {
    const Peer& peer = at(r);
    // Compares all recorded calls, because this rank may have completed the call that differs.
    if (differs(peer)) {
      fail_differing(r);
    } else if (peer.left && peer.calls < call_.number) {
      fail_locked(
          {FailureKind::peer_lost,
           describe_peer(peer) + ", while " + at(rank_).title + " is in " + call_.describe(),
           {r},
           {call_.describe()}},
          true);
    }
  }
}

// Returns true if a peer's calls are known to differ from this rank's.
bool FailureDetector::differs(const Peer& peer) const {
  auto differ = [this](const KnownCall& call) {
    return history_.has(call.number) && history_.fingerprint_of(call.number) != call.fingerprint;
  };
  return differ(peer.from_message) || differ(peer.waiting) || differ(peer.over) ||
         std::any_of(peer.sent_calls.begin(), peer.sent_calls.end(), differ);
}

// Fails the group because a peer's calls differ from this rank's. If the first calls that differ
// are not known, asks the peer for its last calls first, and waits up to kGrace.
void FailureDetector::fail_differing(int rank) {
  Peer& peer = at(rank);
  KnownCalls mine = known_calls(history_), theirs = calls_of(peer);
  Difference found = find_difference(mine, theirs);
  if (!found.is_first && peer.sent_calls.empty() && !peer.left) {
    auto now = Clock::now();
    if (peer.asked_at == Clock::time_point{}) {
      peer.asked_at = now;
      Header header;
      header.kind = Kind::calls;
      header.call = call_.number;
      peer.control.send(header, lines_of(mine));
    }
    if (now - peer.asked_at < kGrace) return;
  }
  fail_locked(mismatch_with(rank, theirs), true);
}

// Compares the calls with those of peers that leave too. Called after this rank's leave frame.
void FailureDetector::compare_at_end() {
  auto waits_for = [](const Peer& peer) {
    return peer.control.is_open() && !peer.left && !peer.address.empty();
  };
  auto until = Clock::now() + kLinger;
  for (;;) {
    receive_frames();
    bool wait = !has_failed() && std::any_of(peers_.begin(), peers_.end(), waits_for);
    if (!wait || Clock::now() >= until) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (int r = 0; r < size() && !has_failed(); ++r) {
    if (!differs(at(r))) continue;
    fail_locked(mismatch_with(r, calls_of(at(r))), true);
  }
}

void FailureDetector::fail_locked(const Failure& failure, bool send_to_others) noexcept {
  if (failure_ || closed_) return;
  failure_ = failure.with_hosts(addresses());
  failed_.store(true);
  if (send_to_others) send_failure();
  wake_.wake();
}

void FailureDetector::send_failure() noexcept {
  Header header;
  header.kind = Kind::failed;
  send_to_all(header, text_of(*failure_));
}

}  // namespace pycollective::tcp
