#include "schedule/verify.h"

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <stdexcept>
#include <utility>

namespace pycollective {
namespace {

constexpr int kExactRanks = 64;

// Whose contributions a chunk holds, and of which chunk they are.
struct Value {
  int chunk = -1;  // -1: never written
  int ranks = 0;
  std::uint64_t set = 0;  // a bit for each rank, or the sum of the ranks' random numbers
};

using Clock = std::vector<int>;

struct Message {
  std::vector<Value> values;
  Clock clock;
  int sender_step;
};

// A peer that reads a chunk because it was sent; `received_at` is the reader's own time, 0 = not
// yet.
struct Reader {
  int rank;
  int received_at;
};

struct Rank {
  std::size_t next = 0;
  std::vector<Value> input, output;
  std::vector<std::vector<Reader>> input_readers, output_readers;
  Clock clock;
};

class Play {
 public:
  Play(const Schedule& schedule, bool in_place)
      : schedule_(schedule), in_place_(in_place), size_(static_cast<int>(schedule.steps.size())) {
    if (size_ < 1) throw std::invalid_argument("a schedule needs at least one rank");
    exact_ = size_ <= kExactRanks;
    std::mt19937_64 random(20090214);
    for (int r = 0; r < size_; ++r) {
      names_.push_back(exact_ ? std::uint64_t{1} << r : random());
      everyone_.set += names_.back();
    }
    everyone_.ranks = size_;
    ranks_.resize(static_cast<std::size_t>(size_));
    auto chunks = static_cast<std::size_t>(schedule.chunks);
    for (int r = 0; r < size_; ++r) {
      Rank& rank = at(r);
      rank.input.resize(chunks);
      rank.output.resize(chunks);
      rank.input_readers.resize(chunks);
      rank.output_readers.resize(chunks);
      if (exact_) {
        rank.clock.assign(static_cast<std::size_t>(size_), 0);
        rank.clock[static_cast<std::size_t>(r)] = 1;
      }
      bool contributes = schedule.collective == Collective::all_reduce || r == 0;
      for (int c = 0; contributes && c < schedule.chunks; ++c) {
        value(r, Buffer::input, c) = {c, 1, names_[static_cast<std::size_t>(r)]};
      }
    }
  }

  std::string run() {
    bool moved = true;
    while (moved && problem_.empty()) {
      moved = false;
      for (int r = 0; r < size_ && problem_.empty(); ++r) {
        while (at(r).next < steps(r).size() && problem_.empty() && play(r)) moved = true;
      }
    }
    if (problem_.empty()) check_ended();
    if (problem_.empty()) check_result();
    return problem_;
  }

 private:
  Rank& at(int r) { return ranks_[static_cast<std::size_t>(r)]; }
  const std::vector<Step>& steps(int r) const {
    return schedule_.steps[static_cast<std::size_t>(r)];
  }
  bool is_output(Buffer buffer) const { return in_place_ || buffer == Buffer::output; }
  Value& value(int r, Buffer buffer, int chunk) {
    return (is_output(buffer) ? at(r).output : at(r).input)[static_cast<std::size_t>(chunk)];
  }
  std::vector<Reader>& readers(int r, Buffer buffer, int chunk) {
    auto& all = is_output(buffer) ? at(r).output_readers : at(r).input_readers;
    return all[static_cast<std::size_t>(chunk)];
  }

  void fail(int r, std::size_t k, const std::string& what) {
    problem_ = "rank " + std::to_string(r) + ", step " + std::to_string(k) + " (" +
               to_string(steps(r)[k]) + "): " + what;
  }

  bool spans_fit(int r, std::size_t k) {
    const Step& step = steps(r)[k];
    bool has_source = step.verb != Verb::recv, has_target = step.verb != Verb::send;
    for (const Span* span :
         {has_source ? &step.source : nullptr, has_target ? &step.target : nullptr}) {
      if (span &&
          (span->first < 0 || span->count < 0 || span->first + span->count > schedule_.chunks)) {
        fail(r, k, "chunks outside 0:" + std::to_string(schedule_.chunks));
      }
    }
    if (has_source && has_target && step.source.count != step.target.count) {
      fail(r, k, "source and target have different numbers of chunks");
    }
    bool talks = step.verb != Verb::copy && step.verb != Verb::reduce;
    if (talks && (step.peer < 0 || step.peer >= size_ || step.peer == r)) {
      fail(r, k, "no such peer among " + std::to_string(size_) + " ranks");
    }
    return problem_.empty();
  }

  // Plays the next step of rank r; false when it must wait for a peer or something is wrong.
  bool play(int r) {
    std::size_t k = at(r).next;
    const Step& step = steps(r)[k];
    if (!spans_fit(r, k)) return false;
    Message message;
    if (step.verb == Verb::send) {
      if (channels_.count({r, step.peer})) return false;
      for (int i = 0; i < step.source.count; ++i) {
        int chunk = step.source.first + i;
        const Value& sent = value(r, step.source.buffer, chunk);
        if (sent.chunk < 0) return fail(r, k, "sends what was never written"), false;
        message.values.push_back(sent);
        if (exact_) readers(r, step.source.buffer, chunk).push_back({step.peer, 0});
      }
      message.clock = at(r).clock;
      message.sender_step = static_cast<int>(k);
      channels_.emplace(std::pair{r, step.peer}, std::move(message));
    } else if (step.verb == Verb::recv || step.verb == Verb::recv_reduce) {
      auto found = channels_.find({step.peer, r});
      if (found == channels_.end()) return false;
      message = std::move(found->second);
      channels_.erase(found);
      if (static_cast<int>(message.values.size()) != step.target.count) {
        return fail(r, k,
                    "rank " + std::to_string(step.peer) + " sent " +
                        std::to_string(message.values.size()) + " chunks"),
               false;
      }
      if (!write(r, k, &message)) return false;
      if (exact_) hear(r, step.peer, message);
    } else if (!write(r, k, nullptr)) {
      return false;
    }
    if (exact_) ++at(r).clock[static_cast<std::size_t>(r)];
    ++at(r).next;
    return true;
  }

  // After a receive: the sender's past is in our past, and the sender's span has been read.
  void hear(int r, int peer, const Message& message) {
    Clock& clock = at(r).clock;
    for (std::size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], message.clock[i]);
    const Step& sent = steps(peer)[static_cast<std::size_t>(message.sender_step)];
    int now = clock[static_cast<std::size_t>(r)];
    for (int i = 0; i < sent.source.count; ++i) {
      for (Reader& reader : readers(peer, sent.source.buffer, sent.source.first + i)) {
        if (reader.rank == r && reader.received_at == 0) {
          reader.received_at = now;
          break;
        }
      }
    }
  }

  bool write(int r, std::size_t k, const Message* message) {
    const Step& step = steps(r)[k];
    for (int i = 0; i < step.target.count; ++i) {
      int chunk = step.target.first + i;
      if (step.target.buffer == Buffer::input) return fail(r, k, "writes to the input"), false;
      for (const Reader& reader : readers(r, step.target.buffer, chunk)) {
        bool over = reader.received_at != 0 &&
                    at(r).clock[static_cast<std::size_t>(reader.rank)] > reader.received_at;
        // What arrives in this very message counts as heard.
        if (!over && message && reader.received_at != 0) {
          over = message->clock[static_cast<std::size_t>(reader.rank)] > reader.received_at;
        }
        if (!over) {
          return fail(r, k,
                      "rank " + std::to_string(reader.rank) + " may still be reading this chunk"),
                 false;
        }
      }
      readers(r, step.target.buffer, chunk).clear();
      Value result;
      if (!combine(r, k, i, message, &result)) return false;
      value(r, step.target.buffer, chunk) = result;
    }
    return true;
  }

  bool combine(int r, std::size_t k, int i, const Message* message, Value* result) {
    const Step& step = steps(r)[k];
    bool reduces = step.verb == Verb::recv_reduce || step.verb == Verb::reduce;
    Value source, other;
    if (step.verb == Verb::recv) {
      source = message->values[static_cast<std::size_t>(i)];
    } else {
      source = value(r, step.source.buffer, step.source.first + i);
      if (source.chunk < 0) return fail(r, k, "reads what was never written"), false;
    }
    if (reduces) {
      other = message ? message->values[static_cast<std::size_t>(i)]
                      : value(r, step.target.buffer, step.target.first + i);
      if (other.chunk != source.chunk) return fail(r, k, "reduces different chunks"), false;
      if (exact_ && (source.set & other.set)) {
        return fail(r, k, "a contribution would be counted twice"), false;
      }
      source.ranks += other.ranks;
      source.set += other.set;
    }
    if (reduces && step.completes != is_everyone(source)) {
      return fail(r, k,
                  step.completes ? "is marked complete and is not"
                                 : "completes the chunk and is not marked so"),
             false;
    }
    *result = source;
    return true;
  }

  bool is_everyone(const Value& v) const {
    return v.ranks == everyone_.ranks && v.set == everyone_.set;
  }

  void check_ended() {
    std::string waiting;
    for (int r = 0; r < size_; ++r) {
      if (at(r).next == steps(r).size()) continue;
      if (!waiting.empty()) waiting += "; ";
      if (waiting.size() > 300) {
        waiting += "…";
        break;
      }
      waiting += "rank " + std::to_string(r) + " waits in step " + std::to_string(at(r).next) +
                 " (" + to_string(steps(r)[at(r).next]) + ")";
    }
    if (!waiting.empty()) problem_ = "deadlock: " + waiting;
    if (problem_.empty() && !channels_.empty()) {
      auto [from, to] = channels_.begin()->first;
      problem_ = "rank " + std::to_string(from) + " sends to rank " + std::to_string(to) +
                 " what is never received";
    }
  }

  void check_result() {
    for (int r = 0; r < size_ && problem_.empty(); ++r) {
      if (schedule_.collective == Collective::barrier) {
        check_heard_everyone(r);
        continue;
      }
      for (int c = 0; c < schedule_.chunks && problem_.empty(); ++c) {
        const Value& v = value(r, Buffer::output, c);
        bool whole = schedule_.collective == Collective::all_reduce
                         ? is_everyone(v)
                         : v.ranks == 1 && v.set == names_[0];
        if (v.chunk != c || !whole) {
          problem_ = "rank " + std::to_string(r) + " ends with a wrong output[" +
                     std::to_string(c) + "]: " + describe(v);
        }
      }
    }
  }

  void check_heard_everyone(int r) {
    for (int p = 0; exact_ && p < size_; ++p) {
      if (at(r).clock[static_cast<std::size_t>(p)] == 0) {
        problem_ = "rank " + std::to_string(r) + " leaves the barrier before rank " +
                   std::to_string(p) + " has entered";
        return;
      }
    }
  }

  std::string describe(const Value& v) const {
    if (v.chunk < 0) return "never written";
    std::string text =
        "chunk " + std::to_string(v.chunk) + " with " + std::to_string(v.ranks) + " contributions";
    if (!exact_) return text;
    text += " from ranks";
    for (int r = 0; r < size_; ++r) {
      if (v.set >> r & 1) text += " " + std::to_string(r);
    }
    return text;
  }

  const Schedule& schedule_;
  bool in_place_;
  int size_;
  bool exact_ = true;
  std::vector<std::uint64_t> names_;
  Value everyone_;
  std::vector<Rank> ranks_;
  std::map<std::pair<int, int>, Message> channels_;
  std::string problem_;
};

}  // namespace

Schedule make_schedule(const Algorithm& algorithm, int size) {
  Schedule schedule;
  schedule.collective = algorithm.collective();
  schedule.chunks = algorithm.num_chunks(size);
  for (int r = 0; r < size; ++r) {
    schedule.steps.push_back(make_plan(algorithm, r, size, 0).steps);
  }
  return schedule;
}

std::string verify(const Schedule& schedule, bool in_place) {
  return Play(schedule, in_place).run();
}

}  // namespace pycollective
