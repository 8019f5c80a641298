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
  double arrival;  // time at which the receiver has all of it
  double bytes;
};

// Requests for shared resources, served in the order of time.
enum class Request : std::uint8_t {
  leave,   // the outgoing port of a message's sender, or of its place
  arrive,  // the incoming port of a message's receiver, or of its place
  work,    // a core for a rank
};
struct Event {
  double time;
  std::uint64_t number;  // orders events at the same time
  Request request;
  int from, to;
  double amount;  // bytes, or seconds of a core

  bool operator>(const Event& other) const {
    return time != other.time ? time > other.time : number > other.number;
  }
};

class Simulator {
 public:
  Simulator(const Algorithm& algorithm, const Cluster& cluster, double bytes, double segment_bytes,
            const Watch& watch)
      : cluster_(cluster),
        watch_(watch),
        parts_(in_parts(algorithm.collective())),
        scratch_(algorithm.num_scratch(cluster.ranks) > 0),
        chunks_(algorithm.num_chunks(cluster.ranks)),
        links_(static_cast<int>(cluster.links.size())),
        buffer_(parts_ ? std::ceil(bytes / cluster.ranks) : bytes),
        full_(block(parts_ ? segment_bytes : segment_bytes * chunks_)),
        blocks_(count_blocks(buffer_, full_.bytes)),
        last_(block(buffer_ - full_.bytes * (blocks_ - 1))),
        walk_(algorithm, cluster.ranks, blocks_, watch),
        mailboxes_(cluster.ranks),
        ranks_(static_cast<std::size_t>(cluster.ranks), Rank{cluster.call_overhead, 0, 0}) {
    result_.bytes.resize(cluster.links.size());
    result_.messages.resize(cluster.links.size());
    for (int i = 0; i < links_; ++i) {
      out_.emplace_back(static_cast<std::size_t>(cluster.ranks));
      in_.emplace_back(static_cast<std::size_t>(cluster.ranks));
      shares_.push_back(i > 0 && link(i).shared && several_in_a_place(i - 1));
    }
    find_senders(algorithm);
    for (int r = 0; r < cluster.ranks; ++r) {
      auto h = static_cast<std::size_t>(host(r));
      if (h >= cores_.size()) cores_.resize(h + 1);
      ++cores_[h].ranks;
    }
    for (Cores& cores : cores_) {
      if (cluster.cores > 0 && cores.ranks > cluster.cores) {
        cores.free.resize(static_cast<std::size_t>(cluster.cores));
      }
    }
  }

  Simulation run() {
    for (;;) {
      while (walk_.any()) {
        int r = walk_.pop();
        while (!walk_.done(r) && execute(r)) advance(r);
      }
      // Every rank is done or waits for an event. The earliest event comes next.
      if (events_.empty()) break;
      Event event = events_.top();
      events_.pop();
      serve(event);
    }
    std::string waiting = walk_.waiting();
    if (!waiting.empty()) throw std::invalid_argument("deadlock: " + waiting);
    if (mailboxes_.count()) {
      int from = 0, to = 0;
      mailboxes_.any(&from, &to);
      throw std::invalid_argument("rank " + std::to_string(from) + " sends to rank " +
                                  std::to_string(to) + " a message that is never received");
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
    double last_read;   // time at which its last message was read
    int unread;         // its messages that are not read yet
    double moving = 0;  // bytes of the step that waits for a core
  };
  struct Cores {
    int ranks = 0;
    std::vector<double> free;  // time at which each core is free; empty: a core for every rank
  };

  // A segment of every chunk, or of every part, as in the executor.
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
  int host(int r) const { return cluster_.places.empty() ? 0 : place(0, r); }
  // Returns the owner of rank r's port of a link: its place if the link is shared, else the rank.
  std::size_t owner(int r, int i) const {
    return static_cast<std::size_t>(shares(i) ? place(i - 1, r) : r);
  }
  bool shares(int i) const { return shares_[static_cast<std::size_t>(i)]; }
  bool several_in_a_place(int level) const {
    std::vector<bool> has_rank(static_cast<std::size_t>(cluster_.ranks));
    for (int r = 0; r < cluster_.ranks; ++r) {
      auto p = static_cast<std::size_t>(place(level, r));
      if (has_rank[p]) return true;
      has_rank[p] = true;
    }
    return false;
  }

  // Finds the incoming ports that receive messages of several senders, by walking through all
  // steps. Only their messages need an event to be put in order: messages of one sender arrive in
  // the order in which they were sent.
  void find_senders(const Algorithm& algorithm) {
    ordered_.resize(static_cast<std::size_t>(cluster_.ranks) * cluster_.links.size());
    std::vector<int> only(static_cast<std::size_t>(links_));
    constexpr std::uint64_t kWatchMask = (1 << 20) - 1;
    std::uint64_t walked = 0;
    for (int r = 0; r < cluster_.ranks; ++r) {
      std::fill(only.begin(), only.end(), -1);
      int open = 0;  // links that may still turn out to have several senders
      for (int i = 0; i < links_; ++i) {
        bool matters = std::isfinite(link(i).bandwidth) && !shares(i);
        ordered(r, i) = shares(i);
        open += matters;
      }
      Steps steps = algorithm.steps(r, cluster_.ranks);
      for (const Step* next; open > 0 && (next = steps.next());) {
        const Step& step = *next;
        if ((++walked & kWatchMask) == 0 && watch_) watch_(0);
        if (step.verb != Verb::recv && step.verb != Verb::recv_reduce) continue;
        int i = link_of(r, step.peer);
        int& sender = only[static_cast<std::size_t>(i)];
        if (sender < 0) sender = step.peer;
        if (sender == step.peer || ordered(r, i) || std::isinf(link(i).bandwidth)) continue;
        ordered(r, i) = true;
        --open;
      }
    }
  }
  char& ordered(int r, int i) {
    return ordered_[static_cast<std::size_t>(r) * cluster_.links.size() +
                    static_cast<std::size_t>(i)];
  }

  // Bytes of a span in a rank's present block.
  double bytes(int r, const Span& span) const {
    if (span.count == 0) return 0;
    const Block& block = walk_.repeated(r) + 1 < blocks_ ? full_ : last_;
    if (parts_) return span.count * block.bytes;
    int first = span.first;
    if (span.buffer == Buffer::scratch) first %= chunks_;
    return std::min((first + span.count) * block.chunk, block.bytes) -
           std::min(first * block.chunk, block.bytes);
  }

  void advance(int r) {
    walk_.advance(r);
    if (walk_.done(r)) finish_block(r);
  }

  // The next block overwrites scratch, so the peers must have read it.
  void finish_block(int r) {
    Rank& rank = at(r);
    if (scratch_ && rank.unread) return;  // received() calls this function again
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

  // Executes the next step of rank r. Returns false if it must wait.
  bool execute(int r) {
    const Step& step = walk_.step(r);
    Rank& rank = at(r);
    const Span& moved = step.verb == Verb::send ? step.source : step.target;
    double count = bytes(r, moved);
    if (count == 0 && moved.count != 0) return true;
    double ready = rank.time, seconds = 0;  // the rank is busy for `seconds` from `ready` on
    switch (step.verb) {
      case Verb::send: {
        const Link& used = link(link_of(r, step.peer));
        seconds = used.overhead + (used.sender_copies ? count / cluster_.copy_rate : 0);
        break;
      }
      case Verb::recv:
      case Verb::recv_reduce: {
        if (!receive(r, step, count, &ready)) return false;
        const Link& used = link(link_of(step.peer, r));
        seconds = used.overhead;
        if (step.verb == Verb::recv_reduce) {
          seconds += count / cluster_.reduce_rate;
        } else if (used.receiver_copies) {
          seconds += count / cluster_.copy_rate;
        }
        break;
      }
      case Verb::copy:
        seconds = count / cluster_.copy_rate;
        break;
      case Verb::reduce:
        seconds = count / cluster_.reduce_rate;
        break;
    }
    if (seconds > 0 && !cores_[static_cast<std::size_t>(host(r))].free.empty()) {
      rank.moving = count;
      events_.push({ready, number_++, Request::work, r, -1, seconds});
      return false;
    }
    worked(r, step, count, ready + seconds);
    return true;
  }

  // Called when the rank's work for a step is done.
  void worked(int r, const Step& step, double count, double time) {
    at(r).time = time;
    if (step.verb == Verb::send) {
      send(r, step.peer, count);
    } else if (step.verb == Verb::recv || step.verb == Verb::recv_reduce) {
      received(step.peer, time);
    }
  }

  void send(int r, int peer, double count) {
    int i = link_of(r, peer);
    ++at(r).unread;
    result_.bytes[static_cast<std::size_t>(i)] += count;
    ++result_.messages[static_cast<std::size_t>(i)];
    if (shares(i)) {
      events_.push({at(r).time, number_++, Request::leave, r, peer, count});
    } else {
      leave(at(r).time, i, r, peer, count);
    }
  }

  void leave(double time, int i, int from, int to, double count) {
    double& free = out_[static_cast<std::size_t>(i)][owner(from, i)];
    double seconds = count / link(i).bandwidth, start = std::max(time, free);
    free = start + seconds;
    double head = start + link(i).latency;
    if (ordered(to, i)) {
      events_.push({head, number_++, Request::arrive, from, to, count});
    } else {
      deliver(from, to, {head + seconds, count});
    }
  }

  void serve(const Event& event) {
    if (event.request == Request::work) {
      int r = event.from;
      auto& cores = cores_[static_cast<std::size_t>(host(r))].free;
      double& free = *std::min_element(cores.begin(), cores.end());
      free = std::max(event.time, free) + event.amount;
      worked(r, walk_.step(r), at(r).moving, free);
      advance(r);
      walk_.wake(r);
      return;
    }
    int i = link_of(event.from, event.to);
    if (event.request == Request::leave) {
      leave(event.time, i, event.from, event.to, event.amount);
      return;
    }
    double& free = in_[static_cast<std::size_t>(i)][owner(event.to, i)];
    free = std::max(event.time, free) + event.amount / link(i).bandwidth;
    deliver(event.from, event.to, {free, event.amount});
  }

  void deliver(int from, int to, const Message& message) {
    mailboxes_.put(from, to, message);
    walk_.wake_if_waiting(to, from);
  }

  // Returns false if the message has not been sent yet. Otherwise moves *ready to its arrival.
  bool receive(int r, const Step& step, double count, double* ready) {
    Message message;
    if (!mailboxes_.take(step.peer, r, &message)) {
      walk_.wait(r, step.peer);
      return false;
    }
    if (message.bytes != count) {
      throw std::invalid_argument("rank " + std::to_string(r) + ", step " +
                                  std::to_string(walk_.number(r)) + " (" + to_string(step) +
                                  "): rank " + std::to_string(step.peer) +
                                  " sent another number of chunks");
    }
    *ready = std::max(*ready, message.arrival);
    return true;
  }

  const Cluster& cluster_;
  const Watch& watch_;
  bool parts_, scratch_;
  int chunks_, links_;
  double buffer_;  // bytes of a rank's buffer, or of one part
  Block full_;
  int blocks_;
  Block last_;
  Walk walk_;
  Mailboxes<Message> mailboxes_;
  std::vector<Rank> ranks_;
  std::vector<std::vector<double>> out_, in_;  // by link and owner: time at which the port is free
  std::vector<bool> shares_;                   // by link: the ranks of a place share a port
  std::vector<char> ordered_;                  // by rank and link: the port has several senders
  std::vector<Cores> cores_;                   // by host
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
    require(level.size() == ranks, "each level needs the place of every rank");
    for (int place : level) {
      require(place >= 0 && place < cluster.ranks, "places are numbers from 0 to ranks - 1");
    }
  }
  for (const Link& link : cluster.links) {
    require(link.latency >= 0 && link.overhead >= 0 && std::isfinite(link.latency) &&
                std::isfinite(link.overhead),
            "latency and overhead must be finite seconds, 0 or more");
    require(link.bandwidth > 0, "bandwidth must be more than 0 bytes per second");
  }
  require(cluster.reduce_rate > 0 && cluster.copy_rate > 0,
          "reduce_rate and copy_rate must be more than 0 bytes per second");
  require(cluster.cores >= 0, "cores must be 0 (one for each rank) or more");
  require(cluster.call_overhead >= 0 && std::isfinite(cluster.call_overhead),
          "call_overhead must be finite seconds, 0 or more");
}

}  // namespace

Simulation simulate(const Algorithm& algorithm, const Cluster& cluster, double bytes,
                    double segment_bytes, const Watch& watch) {
  check(cluster);
  require(bytes >= 0 && bytes <= 1e18, "bytes must be 0 to 1e18");
  require(segment_bytes >= kChunkAlignment, "segment_bytes must be 64 or more");
  return Simulator(algorithm, cluster, bytes, segment_bytes, watch).run();
}

}  // namespace pycollective
