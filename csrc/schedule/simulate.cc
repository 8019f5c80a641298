#include "schedule/simulate.h"

#include <algorithm>
#include <cmath>
#include <queue>
#include <stdexcept>
#include <string>

namespace pycollective {
namespace {

// Chunks begin at multiples of this many bytes, as the executor cuts them.
constexpr double kChunkAlignment = 64;

struct Message {
  double head;     // when it begins to come in; where the link is shared, when it is there
  double seconds;  // that it takes to come in
  double bytes;
};

// What happens at ports that several ranks share, in the order of time.
struct Event {
  double time;
  std::uint64_t number;  // of two at one time, the first asked for is served first
  int from, to;
  double bytes;
  bool arrives;  // at the port of the receiver's place; otherwise at that of the sender's

  bool operator>(const Event& other) const {
    return time != other.time ? time > other.time : number > other.number;
  }
};

class Simulator {
 public:
  Simulator(const Algorithm& algorithm, const Cluster& cluster, double bytes, double segment_bytes,
            const Watch& watch)
      : cluster_(cluster),
        parts_(in_parts(algorithm.collective())),
        scratch_(algorithm.num_scratch(cluster.ranks) > 0),
        chunks_(algorithm.num_chunks(cluster.ranks)),
        links_(static_cast<int>(cluster.links.size())),
        buffer_(parts_ ? std::ceil(bytes / cluster.ranks) : bytes),
        full_(block(parts_ ? segment_bytes : segment_bytes * chunks_)),
        blocks_(count_blocks(buffer_, full_.bytes)),
        last_(block(buffer_ - full_.bytes * (blocks_ - 1))),
        walk_(algorithm, cluster.ranks, blocks_, watch),
        mail_(cluster.ranks),
        ranks_(static_cast<std::size_t>(cluster.ranks), Rank{cluster.call_overhead, 0, 0}) {
    auto n = static_cast<std::size_t>(cluster.ranks), classes = cluster.links.size();
    result_.bytes.resize(classes);
    result_.messages.resize(classes);
    out_.resize(n * classes);
    in_.resize(n * classes);
    // A port of one rank needs no order of events: the rank uses it in the order of its steps.
    for (std::size_t level = 0; level + 1 < classes; ++level) {
      int most = *std::max_element(cluster.places[level].begin(), cluster.places[level].end());
      std::vector<int> members(static_cast<std::size_t>(most) + 1);
      bool several = false;
      for (int place : cluster.places[level]) {
        several = ++members[static_cast<std::size_t>(place)] > 1 || several;
      }
      queued_.push_back(several && cluster.links[level + 1].shared);
      places_out_.emplace_back(members.size());
      places_in_.emplace_back(members.size());
    }
  }

  Simulation run() {
    for (;;) {
      while (walk_.any()) {
        int r = walk_.pop();
        while (!walk_.done(r) && play(r)) advance(r);
      }
      // Every rank is done or waits for what an event brings: none can come before the earliest.
      if (events_.empty()) break;
      Event event = events_.top();
      events_.pop();
      serve(event);
    }
    std::string waiting = walk_.waiting();
    if (!waiting.empty()) throw std::invalid_argument("deadlock: " + waiting);
    if (mail_.count()) {
      int from = 0, to = 0;
      mail_.any(&from, &to);
      throw std::invalid_argument("rank " + std::to_string(from) + " sends to rank " +
                                  std::to_string(to) + " what is never received");
    }
    for (const Rank& rank : ranks_) {
      result_.finish.push_back(std::max(rank.time, rank.last_read));
      result_.seconds = std::max(result_.seconds, result_.finish.back());
    }
    result_.steps = walk_.walked();
    return std::move(result_);
  }

 private:
  struct Rank {
    double time;
    double last_read;  // when the latest of what it sent was read
    int unread;        // of what it sent
  };

  // A run of the schedule over a segment of every chunk, or of every part.
  struct Block {
    double bytes, chunk;
  };
  Block block(double bytes) const {
    return {bytes, parts_ ? bytes : std::ceil(bytes / chunks_ / kChunkAlignment) * kChunkAlignment};
  }
  static int count_blocks(double buffer, double block) {
    double count = std::max(std::ceil(buffer / block), 1.0);
    if (count > 1 << 24) throw std::invalid_argument("the buffer has too many segments");
    return static_cast<int>(count);
  }

  Rank& at(int r) { return ranks_[static_cast<std::size_t>(r)]; }
  int place(int level, int r) const {
    return cluster_.places[static_cast<std::size_t>(level)][static_cast<std::size_t>(r)];
  }
  int link_of(int a, int b) const {
    int level = 0;
    while (level + 1 < links_ && place(level, a) != place(level, b)) ++level;
    return level;
  }
  const Link& link(int i) const { return cluster_.links[static_cast<std::size_t>(i)]; }
  std::size_t port(int r, int i) const { return static_cast<std::size_t>(r * links_ + i); }

  // Bytes of a span in a rank's present block.
  double bytes(int r, const Span& span) const {
    if (span.count == 0) return 0;
    const Block& block = walk_.repeated(r) + 1 < blocks_ ? full_ : last_;
    if (parts_) return block.bytes;
    int first = span.first;
    if (span.buffer == Buffer::scratch) first %= chunks_;
    return std::min((first + span.count) * block.chunk, block.bytes) -
           std::min(first * block.chunk, block.bytes);
  }

  void advance(int r) {
    walk_.advance(r);
    if (walk_.done(r)) finish_block(r);
  }

  // Scratch is written anew in each block, so that what was sent has to be read first.
  void finish_block(int r) {
    Rank& rank = at(r);
    if (scratch_ && rank.unread) return;  // goes on in received()
    if (walk_.repeat(r) && scratch_) rank.time = std::max(rank.time, rank.last_read);
  }

  void received(int sender, double when) {
    Rank& rank = at(sender);
    rank.last_read = std::max(rank.last_read, when);
    if (--rank.unread == 0 && scratch_ && walk_.done(sender)) {
      finish_block(sender);
      if (!walk_.done(sender)) walk_.wake(sender);
    }
  }

  // Plays the next step of rank r; false when it waits for a message.
  bool play(int r) {
    Step step = walk_.step(r);
    Rank& rank = at(r);
    const Span& moved = step.verb == Verb::send ? step.source : step.target;
    double count = bytes(r, moved);
    if (count == 0 && moved.count != 0) return true;
    switch (step.verb) {
      case Verb::send:
        send(r, step.peer, count);
        return true;
      case Verb::recv:
      case Verb::recv_reduce:
        return receive(r, step, count);
      case Verb::copy:
        rank.time += count / cluster_.copy_rate;
        return true;
      case Verb::reduce:
        rank.time += count / cluster_.reduce_rate;
        return true;
    }
    return true;
  }

  void send(int r, int peer, double count) {
    Rank& rank = at(r);
    int i = link_of(r, peer);
    const Link& way = link(i);
    rank.time += way.overhead;
    if (way.sender_copies) rank.time += count / cluster_.copy_rate;
    ++rank.unread;
    result_.bytes[static_cast<std::size_t>(i)] += count;
    ++result_.messages[static_cast<std::size_t>(i)];
    if (i > 0 && queued_[static_cast<std::size_t>(i) - 1]) {
      events_.push({rank.time, number_++, r, peer, count, false});
      return;
    }
    double& free = out_[port(r, i)];
    double seconds = count / way.bandwidth, start = std::max(rank.time, free);
    free = start + seconds;
    deliver(r, peer, {start + way.latency, seconds, count});
  }

  void deliver(int from, int to, const Message& message) {
    mail_.put(from, to, message);
    walk_.wake_if_waiting(to, from);
  }

  void serve(const Event& event) {
    int i = link_of(event.from, event.to);
    const Link& way = link(i);
    auto level = static_cast<std::size_t>(i) - 1;
    auto& ports = event.arrives ? places_in_[level] : places_out_[level];
    int owner = place(i - 1, event.arrives ? event.to : event.from);
    double& free = ports[static_cast<std::size_t>(owner)];
    double start = std::max(event.time, free), seconds = event.bytes / way.bandwidth;
    free = start + seconds;
    if (event.arrives) {
      deliver(event.from, event.to, {free, 0, event.bytes});
    } else {
      events_.push({start + way.latency, number_++, event.from, event.to, event.bytes, true});
    }
  }

  bool receive(int r, const Step& step, double count) {
    Message message;
    if (!mail_.take(step.peer, r, &message)) {
      walk_.wait(r, step.peer);
      return false;
    }
    if (message.bytes != count) {
      throw std::invalid_argument("rank " + std::to_string(r) + ", step " +
                                  std::to_string(walk_.number(r)) + " (" + to_string(step) +
                                  "): rank " + std::to_string(step.peer) +
                                  " sent another number of chunks");
    }
    Rank& rank = at(r);
    int i = link_of(step.peer, r);
    double there = message.head;
    if (message.seconds > 0) {
      double& free = in_[port(r, i)];
      free = there = std::max(there, free) + message.seconds;
    }
    rank.time = std::max(rank.time, there) + link(i).overhead;
    if (step.verb == Verb::recv_reduce) {
      rank.time += count / cluster_.reduce_rate;
    } else if (link(i).receiver_copies) {
      rank.time += count / cluster_.copy_rate;
    }
    received(step.peer, rank.time);
    return true;
  }

  const Cluster& cluster_;
  bool parts_, scratch_;
  int chunks_, links_;
  double buffer_;  // bytes of a rank's buffer, or of a part
  Block full_;
  int blocks_;
  Block last_;
  Walk walk_;
  Mail<Message> mail_;
  std::vector<Rank> ranks_;
  std::vector<double> out_, in_;  // when each rank's port of a link is free
  std::vector<bool> queued_;      // by level: its places' ports are shared
  std::vector<std::vector<double>> places_out_, places_in_;  // by level and place
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::uint64_t number_ = 0;
  Simulation result_;
};

void require(bool fine, const std::string& what) {
  if (!fine) throw std::invalid_argument(what);
}

void check(const Cluster& cluster) {
  auto ranks = static_cast<std::size_t>(cluster.ranks);
  require(cluster.ranks >= 1, "a cluster has at least 1 rank");
  require(cluster.links.size() == cluster.places.size() + 1,
          "a cluster needs a link for each level of places and one more");
  for (const auto& level : cluster.places) {
    require(level.size() == ranks, "each level names the place of each rank");
    for (int place : level) {
      require(place >= 0 && place < cluster.ranks, "places are numbered from 0, below the ranks");
    }
  }
  for (const Link& link : cluster.links) {
    require(link.latency >= 0 && link.overhead >= 0 && std::isfinite(link.latency) &&
                std::isfinite(link.overhead),
            "latency and overhead are seconds, 0 or more");
    require(link.bandwidth > 0, "bandwidth is more than 0 bytes a second");
  }
  require(cluster.reduce_rate > 0 && cluster.copy_rate > 0, "rates are more than 0 bytes a second");
  require(cluster.call_overhead >= 0 && std::isfinite(cluster.call_overhead),
          "call_overhead is seconds, 0 or more");
}

}  // namespace

Simulation simulate(const Algorithm& algorithm, const Cluster& cluster, double bytes,
                    double segment_bytes, const Watch& watch) {
  check(cluster);
  require(bytes >= 0 && bytes <= 1e18, "bytes are 0 to 1e18");
  require(segment_bytes >= kChunkAlignment, "a segment has at least 64 bytes");
  return Simulator(algorithm, cluster, bytes, segment_bytes, watch).run();
}

}  // namespace pycollective
