#include "transport/tcp.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "support/cores.h"
#include "support/round_up.h"
#include "support/tuning.h"
#include "transport/sockets.h"
#include "transport/tcp_detector.h"
#include "transport/tcp_frame.h"
#include "transport/tcp_pipes.h"
#include "transport/tcp_stream.h"

namespace pycollective {
namespace {

using tcp::FailureDetector, tcp::Header, tcp::kCallText, tcp::Kind, tcp::Stream;

// The longest sleep while a connection is broken and the reason has not arrived.
constexpr auto kBrokenSlice = std::chrono::milliseconds(10);

// The connections for messages to a peer.
struct Peer {
  std::vector<Stream> streams;
  // The message that is being sent, or the rest of it.
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
  bool to_begin = false;  // some parts are not in a stream yet
  bool sending = false;
  std::uint64_t parts_out = 0, parts_in = 0;
  std::uint64_t described = 0;       // the last call whose description was sent to the peer
  Clock::time_point broken_since{};  // zero: no stream is broken
};

void check_streams(int rank, const std::vector<std::vector<int>>& streams, bool others) {
  const int size = static_cast<int>(streams.size());
  if (rank < 0 || rank >= size)
    throw std::invalid_argument("rank " + std::to_string(rank) + " is not in a group of " +
                                std::to_string(size) + " ranks");
  for (int r = 0; r < size; ++r) {
    const auto& given = streams[static_cast<std::size_t>(r)];
    if (r == rank ? !given.empty() : given.size() < (others ? 1U : 2U)) {
      throw std::invalid_argument(
          others ? "every peer needs a control connection"
                 : "every peer needs a control connection and one or more for messages");
    }
  }
}

}  // namespace

// This process's rank: its connections, and its endpoint.
class TcpGroup::Member final : public Endpoint {
 public:
  Member(TcpGroup& group, int rank, const std::vector<std::vector<int>>& streams)
      : group_(group), detector_(rank, streams), peers_(streams.size()) {
    std::size_t count = 0;
    for (std::size_t r = 0; r < streams.size(); ++r) {
      const auto& given = streams[r];
      if (given.empty()) continue;
      peers_[r].streams = std::vector<Stream>(given.size() - 1);
      for (std::size_t s = 1; s < given.size(); ++s) peers_[r].streams[s - 1].open(given[s]);
      count += given.size();
    }
    polled_.reserve(2 + count);
  }

  FailureDetector& detector() { return detector_; }

  void leave_group() noexcept {
    if (detector_.leave()) close_streams();
  }

  void close_all() noexcept {
    detector_.close();
    close_streams();
  }

  // Endpoint -----------------------------------------------------------------------------------

  int rank() const override { return detector_.rank(); }

  void enter(const CallRecord& call) override {
    detector_.enter(call);
    fingerprint_ = detector_.call().fingerprint;
    text_.clear();
  }

  void leave() noexcept override {
    if (unsent_ > 0) {  // after a failure: the caller owns the memory again
      for (Peer& peer : peers_) {
        peer.sending = peer.to_begin = false;
        for (Stream& stream : peer.streams) stream.stop_sending();
      }
      unsent_ = 0;
    }
    detector_.leave_call();
  }

  bool try_send(int to, const void* data, std::size_t bytes) override {
    Peer& peer = at(to);
    if (peer.sending && !push(to)) return false;
    peer.data = static_cast<const std::byte*>(data);
    peer.bytes = bytes;
    peer.to_begin = peer.sending = true;
    ++unsent_;
    push(to);
    return true;
  }

  Piece try_receive(int from, std::size_t remaining) override {
    return try_receive_into(from, remaining, nullptr);
  }

  Piece try_receive_into(int from, std::size_t remaining, void* target) override {
    if (unsent_ > 0) progress();
    Peer& peer = at(from);
    Stream& stream = peer.streams[peer.parts_in % peer.streams.size()];
    if (!stream.whole()) fill(from, stream, static_cast<std::byte*>(target), remaining);
    if (!stream.whole()) {
      wanted_ = &stream;
      if (stream.broken()) detector_.check_broken(from, peer.broken_since);
      return {};
    }
    wanted_ = nullptr;
    const Header& header = stream.header();
    if (header.fingerprint != fingerprint_ || header.remaining != remaining) {
      detector_.fail_mismatch(from);
    }
    return {stream.part(), header.bytes};
  }

  void release(int from) override {
    Peer& peer = at(from);
    peer.streams[peer.parts_in % peer.streams.size()].release();
    ++peer.parts_in;
  }

  std::uint64_t moved() const override { return moved_; }

  void progress() override {
    for (int peer = 0; unsent_ > 0 && peer < detector_.size(); ++peer) {
      if (at(peer).sending) push(peer);
    }
  }

  // True if all messages are in the kernel, which delivers them even after the end of this process.
  bool flushed() override { return unsent_ == 0; }
  bool flushed_to(int peer) override { return !at(peer).sending; }

  void check() override { detector_.check_now(); }
  CallRecord call() const override { return detector_.call(); }
  void fail(const Failure& failure) noexcept override { detector_.fail(failure); }

  // Sleeper ------------------------------------------------------------------------------------

  SpinLimit spin_limit() override { return socket_spin_limit(group_.is_oversubscribed()); }
  bool has_failed() override { return detector_.has_failed(); }

  void check_peers() override {
    detector_.receive();
    peek();
    detector_.announce_call();
  }

  // Also ends if another thread fails the group.
  bool sleep(Clock::duration limit) override {
    polled_.clear();
    detector_.add_polled(polled_);
    for (Peer& peer : peers_) {
      if (peer.broken_since != Clock::time_point{}) {
        limit = std::min<Clock::duration>(limit, kBrokenSlice);
      }
      for (Stream& stream : peer.streams) {
        int events = (&stream == wanted_ ? POLLIN : 0) | (stream.sending() ? POLLOUT : 0);
        if (!events || stream.broken()) continue;
        polled_.push_back({stream.descriptor(), static_cast<short>(events), 0});
      }
    }
    auto ms = std::chrono::ceil<std::chrono::milliseconds>(limit).count();
    int ready = poll(polled_.data(), static_cast<nfds_t>(polled_.size()), static_cast<int>(ms));
    if (ready > 0 && detector_.is_ready(polled_)) detector_.receive();
    return ready >= 0;
  }

 private:
  Group& group() override { return group_; }
  Peer& at(int rank) { return peers_[static_cast<std::size_t>(rank)]; }

  void close_streams() noexcept {
    for (Peer& peer : peers_) {
      for (Stream& stream : peer.streams) stream.close();
    }
  }

  // Sending ------------------------------------------------------------------------------------

  // Writes as much as the sockets accept. Returns true if nothing is left to send to this peer.
  bool push(int to) {
    Peer& peer = at(to);
    std::size_t count = peer.streams.size();
    // The limit ends the loop if the peer reads as fast as this rank writes.
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
        if (!write(to, stream))
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
    header.call = detector_.call().number;
    header.remaining = peer.bytes;
    std::size_t part = tcp_part_bytes(peer.bytes);
    header.bytes = static_cast<std::uint32_t>(part);
    const std::string& text = my_text();
    // The first message of a call has the call's description.
    if (std::exchange(peer.described, header.call) != header.call) {
      header.text = static_cast<std::uint32_t>(text.size());
    }
    stream.begin(header, text, peer.data);
    if (part) peer.data += part;
    peer.bytes -= part;
    peer.to_begin = peer.bytes > 0;
    ++peer.parts_out;
  }

  // Describes this rank's call, padded with spaces so that the data after it is aligned.
  const std::string& my_text() {
    if (text_.empty()) {
      text_ = detector_.call().describe();
      text_.resize(std::min(round_up(text_.size(), kCacheLine), kCallText), ' ');
    }
    return text_;
  }

  // Returns true if the stream's part is written completely.
  bool write(int to, Stream& stream) {
    if (stream.broken()) {
      detector_.check_broken(to, at(to).broken_since);
      return false;
    }
    bool done = stream.write(moved_);
    if (stream.broken()) mark_broken(to);
    return done;
  }

  // Receiving ----------------------------------------------------------------------------------

  void fill(int from, Stream& stream, std::byte* target, std::size_t remaining) {
    bool was_broken = stream.broken();
    Stream::Read read;
    while ((read = stream.read(moved_)) == Stream::Read::header) {
      const Header header = stream.header();  // a copy, because accept() may move the frame
      if (const char* wrong = tcp::wrong_with_message(header)) {
        detector_.fail({FailureKind::peer_lost,
                        detector_.title(from) + " sent " + wrong + " to " + detector_.title(rank()),
                        {from},
                        {call().describe()}});
        detector_.check();
      }
      stream.accept();
      bool awaited = header.fingerprint == fingerprint_ && header.remaining == remaining;
      if (target && awaited) stream.read_directly_to(target);
    }
    if (read == Stream::Read::whole) {
      record_call(from, stream.header(), stream.text());
    } else if (stream.broken() && !was_broken) {
      mark_broken(from);
    }
  }

  void record_call(int from, const Header& header, std::string text) {
    if (!header.text) return;
    detector_.record_call(from, {header.call, header.fingerprint, std::move(text)});
  }

  // Detects peers in other calls by the headers of messages that this call does not receive.
  void peek() {
    for (int from = 0; from < detector_.size(); ++from) {
      Peer& peer = at(from);
      if (peer.streams.empty()) continue;
      Header header;
      std::string text;
      if (peer.streams[peer.parts_in % peer.streams.size()].peek(header, text)) {
        record_call(from, header, std::move(text));
      }
    }
  }

  void mark_broken(int with) {
    Peer& peer = at(with);
    if (peer.broken_since == Clock::time_point{}) peer.broken_since = Clock::now();
    detector_.check_broken(with, peer.broken_since);
  }

  TcpGroup& group_;
  FailureDetector detector_;
  std::vector<Peer> peers_;

  // Used by the thread that makes a call.
  std::uint64_t fingerprint_ = 0;
  std::string text_;
  int unsent_ = 0;  // peers with something to send
  std::uint64_t moved_ = 0;
  const Stream* wanted_ = nullptr;  // the stream of the next part
  std::vector<pollfd> polled_;
};

TcpGroup::TcpGroup(int rank, const std::vector<std::vector<int>>& streams,
                   const std::vector<int>& pipes, bool others) {
  check_streams(rank, streams, others);
  member_ = std::make_unique<Member>(*this, rank, streams);
  if (pipes.empty()) return;
  if (pipes.size() != streams.size())
    throw std::invalid_argument("`pipes` must have a socket for every rank");
  std::vector<Descriptor> copies;
  for (int r = 0; r < size(); ++r) {
    copies.push_back(r == rank ? Descriptor()
                               : duplicate_socket(pipes[static_cast<std::size_t>(r)]));
  }
  pipes_ = std::make_shared<TcpPipes>(std::move(copies));
}

TcpGroup::~TcpGroup() { leave(rank()); }

int TcpGroup::rank() const { return member_->rank(); }
int TcpGroup::size() const { return member_->detector().size(); }

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

std::shared_ptr<Pipes> TcpGroup::pipes(int rank) {
  endpoint(rank);
  if (!pipes_)
    throw std::logic_error(
        "this group was made without `pipes`, the connections for point-to-point messages");
  return pipes_;
}

void TcpGroup::fail(const Failure& failure) noexcept { member_->fail(failure); }
std::optional<Failure> TcpGroup::failure() const { return member_->detector().failure(); }
bool TcpGroup::has_left(int rank) const { return member_->detector().has_left(rank); }
std::string TcpGroup::address(int rank) const { return member_->detector().address(rank); }
std::uint64_t TcpGroup::calls(int rank) const { return member_->detector().calls(rank); }
std::vector<std::string> TcpGroup::addresses() const { return member_->detector().addresses(); }
void TcpGroup::send_heartbeat() { member_->detector().send_heartbeat(); }
std::vector<int> TcpGroup::silent(double seconds) { return member_->detector().silent(seconds); }
std::string TcpGroup::describe(int rank) const { return member_->detector().describe(rank); }
TitledRank TcpGroup::titled(int rank) const { return {rank, member_->detector().title(rank)}; }
void TcpGroup::set_titles(const std::vector<std::string>& titles) {
  member_->detector().set_titles(titles);
}
void TcpGroup::announce_message(int, const std::string& message) noexcept {
  member_->detector().announce_message(message);
}
void TcpGroup::set_describe(std::function<std::string(int)> describe) {
  member_->detector().set_describe(std::move(describe));
}
void TcpGroup::wake(int rank) noexcept { member_->detector().wake(rank); }
int TcpGroup::here() const { return member_->detector().here(); }
bool TcpGroup::is_oversubscribed() const { return has_more_than_cores(here()); }

std::vector<int> TcpGroup::hosts() const {
  std::vector<int> hosts(static_cast<std::size_t>(size()));
  std::iota(hosts.begin(), hosts.end(), 0);
  return hosts;
}

}  // namespace pycollective
