#include "schedule/verify.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

namespace pycollective {
namespace {

// The symbolic content of a chunk: the chunk of the data, and the ranks whose contributions it has.
struct Value {
  int chunk = -1;  // -1: never written
  int ranks = 0;
  std::uint64_t set = 0;  // a bit for each rank
  // A number for the order of the additions. `a + b` and `b + a` have the same bits, and the same
  // number; `(a + b) + c` and `a + (b + c)` do not.
  std::uint64_t order = 0;
};

std::uint64_t order_of_sum(std::uint64_t a, std::uint64_t b) {
  const std::uint64_t mixed = std::min(a, b) * 0x9e3779b97f4a7c15 + std::max(a, b);
  return (mixed ^ mixed >> 29) * 0xbf58476d1ce4e5b9;
}

using Clock = std::vector<int>;

struct Message {
  std::vector<Value> values;
  Clock clock;
  int sender_step;
};

// A peer that reads a sent chunk. `received_at` is the time on the reader's clock; 0: not yet.
struct Reader {
  int rank;
  int received_at;
};

// The storage of one chunk.
struct Cell {
  Value value;
  std::vector<Reader> readers;
};

struct Rank {
  std::size_t next = 0;
  int inputs = 0, outputs = 0;  // chunks of its buffers
  std::vector<Cell> cells;      // input, output, scratch
  Clock clock;
};

class Execution {
 public:
  Execution(const Schedule& schedule, bool in_place, int filled)
      : schedule_(schedule),
        collective_(schedule.collective),
        in_place_(in_place && can_be_in_place(collective_)),
        in_parts_(in_parts(collective_)),
        filled_(filled > 0 && !in_parts_ ? filled : schedule.chunks),
        size_(static_cast<int>(schedule.steps.size())),
        shape_(collective_, schedule.chunks, schedule.scratch, size_) {
    for (int r = 0; r < size_; ++r) everyone_.set += std::uint64_t{1} << r;
    everyone_.ranks = size_;
    ranks_.resize(static_cast<std::size_t>(size_));
    for (int r = 0; r < size_; ++r) {
      Rank& rank = at(r);
      rank.inputs = input_chunks(collective_, schedule.chunks, r, size_);
      rank.outputs = output_chunks(collective_, schedule.chunks, r, size_);
      rank.cells.resize(static_cast<std::size_t>(rank.inputs + rank.outputs + schedule.scratch));
      rank.clock.assign(static_cast<std::size_t>(size_), 0);
      rank.clock[static_cast<std::size_t>(r)] = 1;
      for (int i = 0; i < rank.inputs; ++i) {
        Content content = initial_content(collective_, r, size_, i);
        if (content.end > content.begin) cell(r, Buffer::input, i).value = value_of(content);
      }
    }
  }

  // Collects the steps that complete a chunk, as (rank, step), instead of checking the marks.
  void collect_marks(std::vector<std::pair<int, std::size_t>>* marks) { marks_ = marks; }

  std::string run() {
    bool moved = true;
    while (moved && problem_.empty()) {
      moved = false;
      for (int r = 0; r < size_ && problem_.empty(); ++r) {
        while (at(r).next < steps(r).size() && problem_.empty() && execute(r)) moved = true;
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
  Value value_of(const Content& content) const {
    Value value{content.chunk, content.end - content.begin, 0};
    for (int r = content.begin; r < content.end; ++r) value.set += std::uint64_t{1} << r;
    value.order = value.set;
    return value;
  }
  // Returns the index in a buffer. In a buffer of parts, the first part follows the last one.
  int place(int r, Buffer buffer, int i) const {
    if (!in_parts_ || buffer == Buffer::scratch) return i;
    const Rank& rank = ranks_[static_cast<std::size_t>(r)];
    return index_of_part(i, buffer == Buffer::input ? rank.inputs : rank.outputs);
  }
  // In place, the smaller buffer is a part of the larger one.
  Cell& cell(int r, Buffer buffer, int i) {
    Rank& rank = at(r);
    i = place(r, buffer, i);
    if (in_place_ && in_parts_) {
      if (buffer == Buffer::input && rank.outputs == size_) buffer = Buffer::output, i = r;
      if (buffer == Buffer::output && rank.inputs == size_) buffer = Buffer::input, i = r;
    } else if (in_place_ && buffer == Buffer::input && i < rank.outputs) {
      buffer = Buffer::output;
    }
    if (buffer != Buffer::input) i += rank.inputs;
    if (buffer == Buffer::scratch) i += rank.outputs;
    return rank.cells[static_cast<std::size_t>(i)];
  }
  // Returns the chunk that an index must hold; -1 if it may hold any chunk.
  int belongs(int r, Buffer buffer, int i) const {
    if (buffer == Buffer::output) {
      return final_content(collective_, r, size_, place(r, buffer, i)).chunk;
    }
    return in_parts_ ? -1 : i % schedule_.chunks;
  }

  // Returns the span without empty chunks.
  Span filled(Span span) const {
    if (in_parts_ || span.count == 0) return span;
    int first = span.first % schedule_.chunks;
    span.count = std::clamp(filled_ - first, 0, span.count);
    return span;
  }
  bool is_empty(const Step& step) const {
    const Span& moved = step.verb == Verb::send ? step.source : step.target;
    return moved.count != 0 && filled(moved).count == 0;
  }

  void fail(int r, std::size_t k, const std::string& what) {
    problem_ = "rank " + std::to_string(r) + ", step " + std::to_string(k) + " (" +
               to_string(steps(r)[k]) + "): " + what;
  }

  // Executes the next step of rank r. Returns false if it must wait for a peer, or after an error.
  bool execute(int r) {
    std::size_t k = at(r).next;
    const Step& step = steps(r)[k];
    if (Misfit misfit = find_misfit(step, r, shape_); misfit != Misfit::none) {
      return fail(r, k, explain(misfit, step, r, shape_)), false;
    }
    if (is_empty(step)) return ++at(r).next, true;
    Message message;
    if (step.verb == Verb::send) {
      if (channels_.count({r, step.peer})) return false;
      Span source = filled(step.source);
      for (int i = 0; i < source.count; ++i) {
        Cell& sent = cell(r, source.buffer, source.first + i);
        if (sent.value.chunk < 0) return fail(r, k, "sends a chunk that was never written"), false;
        message.values.push_back(sent.value);
        sent.readers.push_back({step.peer, 0});
      }
      message.clock = at(r).clock;
      message.sender_step = static_cast<int>(k);
      channels_.emplace(std::pair{r, step.peer}, std::move(message));
    } else if (step.verb == Verb::recv || step.verb == Verb::recv_reduce) {
      auto found = channels_.find({step.peer, r});
      if (found == channels_.end()) return false;
      message = std::move(found->second);
      channels_.erase(found);
      if (static_cast<int>(message.values.size()) != filled(step.target).count) {
        return fail(r, k,
                    "rank " + std::to_string(step.peer) + " sent " +
                        std::to_string(message.values.size()) + " chunks"),
               false;
      }
      if (!write(r, k, &message)) return false;
      merge_clock(r, step.peer, message);
    } else if (!write(r, k, nullptr)) {
      return false;
    }
    ++at(r).clock[static_cast<std::size_t>(r)];
    ++at(r).next;
    return true;
  }

  // After a receive: merges the sender's clock, and marks the sender's span as read.
  void merge_clock(int r, int peer, const Message& message) {
    Clock& clock = at(r).clock;
    for (std::size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], message.clock[i]);
    Span sent = filled(steps(peer)[static_cast<std::size_t>(message.sender_step)].source);
    int now = clock[static_cast<std::size_t>(r)];
    for (int i = 0; i < sent.count; ++i) {
      for (Reader& reader : cell(peer, sent.buffer, sent.first + i).readers) {
        if (reader.rank == r && reader.received_at == 0) {
          reader.received_at = now;
          break;
        }
      }
    }
  }

  bool write(int r, std::size_t k, const Message* message) {
    const Step& step = steps(r)[k];
    Span target = filled(step.target);
    for (int i = 0; i < target.count; ++i) {
      if (target.buffer == Buffer::input) return fail(r, k, "writes to the input"), false;
      Cell& written = cell(r, target.buffer, target.first + i);
      for (const Reader& reader : written.readers) {
        bool over = reader.received_at != 0 &&
                    at(r).clock[static_cast<std::size_t>(reader.rank)] > reader.received_at;
        // The clock of the message that is being received counts too.
        if (!over && message && reader.received_at != 0) {
          over = message->clock[static_cast<std::size_t>(reader.rank)] > reader.received_at;
        }
        if (!over) {
          return fail(r, k,
                      "rank " + std::to_string(reader.rank) + " may still be reading this chunk"),
                 false;
        }
      }
      written.readers.clear();
      Value result;
      if (!combine(r, k, i, message, &result)) return false;
      int wanted = belongs(r, target.buffer, target.first + i);
      if (wanted >= 0 && result.chunk != wanted) {
        return fail(r, k,
                    "puts chunk " + std::to_string(result.chunk) + " where chunk " +
                        std::to_string(wanted) + " belongs"),
               false;
      }
      written.value = result;
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
      source = cell(r, step.source.buffer, step.source.first + i).value;
      if (source.chunk < 0) return fail(r, k, "reads a chunk that was never written"), false;
    }
    if (reduces) {
      other = message ? message->values[static_cast<std::size_t>(i)]
                      : cell(r, step.target.buffer, step.target.first + i).value;
      if (other.chunk != source.chunk) return fail(r, k, "reduces different chunks"), false;
      if (source.set & other.set) {
        return fail(r, k, "a contribution would be counted twice"), false;
      }
      source.ranks += other.ranks;
      source.set += other.set;
      source.order = order_of_sum(source.order, other.order);
    }
    const bool is_complete = is_everyone(source) && !is_prefix(collective_);
    if (marks_) {
      if (reduces && is_complete) marks_->push_back({r, k});
    } else if (reduces && step.completes != is_complete) {
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
                 " a message that is never received";
    }
  }

  void check_result() {
    for (int r = 0; r < size_ && problem_.empty(); ++r) {
      if (collective_ == Collective::barrier) {
        check_barrier(r);
        continue;
      }
      int count = in_parts_ ? at(r).outputs : std::min(at(r).outputs, filled_);
      for (int i = 0; i < count && problem_.empty(); ++i) {
        const Value& v = cell(r, Buffer::output, i).value;
        Value wanted = value_of(final_content(collective_, r, size_, i));
        if (v.chunk != wanted.chunk || v.ranks != wanted.ranks || v.set != wanted.set) {
          problem_ = "rank " + std::to_string(r) + " ends with a wrong output[" +
                     std::to_string(i) + "]: " + describe(v);
        } else if (collective_ == Collective::all_reduce &&
                   v.order != cell(0, Buffer::output, i).value.order) {
          problem_ = "rank " + std::to_string(r) + " adds output[" + std::to_string(i) +
                     "] in another order than rank 0, so that rounding may give other bits";
        }
      }
    }
  }

  void check_barrier(int r) {
    for (int p = 0; p < size_; ++p) {
      if (at(r).clock[static_cast<std::size_t>(p)] == 0) {
        problem_ = "rank " + std::to_string(r) + " leaves the barrier before rank " +
                   std::to_string(p) + " has entered";
        return;
      }
    }
  }

  std::string describe(const Value& v) const {
    if (v.chunk < 0) return "never written";
    std::string text = "chunk " + std::to_string(v.chunk) + " with the " +
                       (v.ranks == 1 ? "contribution of rank" : "contributions of ranks");
    for (int r = 0; r < size_; ++r) {
      if (v.set >> r & 1) text += " " + std::to_string(r);
    }
    return text;
  }

  const Schedule& schedule_;
  Collective collective_;
  bool in_place_;
  bool in_parts_;
  int filled_;
  int size_;
  Shape shape_;
  Value everyone_;
  std::vector<Rank> ranks_;
  std::map<std::pair<int, int>, Message> channels_;
  std::vector<std::pair<int, std::size_t>>* marks_ = nullptr;
  std::string problem_;
};

}  // namespace

Shape::Shape(Collective collective, int chunks, int scratch, int size)
    : collective(collective),
      parts(in_parts(collective)),
      reduces(pycollective::reduces(collective)),
      chunks(chunks),
      scratch(scratch),
      size(size),
      root{input_chunks(collective, chunks, 0, size), output_chunks(collective, chunks, 0, size),
           scratch},
      others{input_chunks(collective, chunks, 1, size), output_chunks(collective, chunks, 1, size),
             scratch} {
  if (size < 1) throw std::invalid_argument("a schedule needs at least one rank");
  if (chunks < 1) throw std::invalid_argument("a schedule needs at least one chunk");
  constexpr int kMost = 1 << 24;
  if (chunks > kMost || scratch > kMost) {
    throw std::invalid_argument("a schedule has at most " + std::to_string(kMost) +
                                " chunks, and as many of scratch");
  }
  if (scratch < 0) throw std::invalid_argument("scratch has 0 chunks or more");
}

namespace {

bool is_inside(const Span& span, int rank, const Shape& shape) {
  // Unsigned: negative numbers become too large.
  auto first = static_cast<unsigned>(span.first), count = static_cast<unsigned>(span.count);
  auto chunks = static_cast<unsigned>(shape.chunks_of(rank, span.buffer));
  // The first part follows the last one.
  bool round = shape.parts && span.buffer != Buffer::scratch;
  return count == 0 || (first < chunks && count <= (round ? chunks : chunks - first));
}

// Returns false if a span of scratch crosses the last chunk. Scratch repeats the chunks' lengths.
bool is_contiguous(const Span& span, const Shape& shape) {
  return shape.parts || span.buffer != Buffer::scratch || span.count == 0 ||
         span.first % shape.chunks + span.count <= shape.chunks;
}

// Returns true if a step would overwrite chunks that it has not read yet.
bool is_overlapping(const Step& step, int rank, const Shape& shape) {
  const Span &source = step.source, &target = step.target;
  if (source.buffer != target.buffer || source.first == target.first) return false;
  const int shift = std::abs(target.first - source.first);
  const bool round = shape.parts && source.buffer != Buffer::scratch;
  return shift < source.count ||
         (round && shape.chunks_of(rank, source.buffer) - shift < source.count);
}

}  // namespace

Misfit find_misfit(const Step& step, int rank, const Shape& shape) {
  bool has_source = step.verb != Verb::recv, has_target = step.verb != Verb::send;
  if (has_source && !is_inside(step.source, rank, shape)) return Misfit::source;
  if (has_source && !is_contiguous(step.source, shape)) return Misfit::pieces;
  if (has_target && !is_inside(step.target, rank, shape)) return Misfit::target;
  if (has_target && !is_contiguous(step.target, shape)) return Misfit::pieces;
  if (has_source && has_target && step.source.count != step.target.count) return Misfit::lengths;
  if (has_source && has_target && is_overlapping(step, rank, shape)) return Misfit::overlap;
  bool has_message = step.verb != Verb::copy && step.verb != Verb::reduce;
  bool has_peer = step.peer >= 0 && step.peer < shape.size && step.peer != rank;
  if (has_message && !has_peer) return Misfit::peer;
  bool adds = step.verb == Verb::recv_reduce || step.verb == Verb::reduce;
  if (adds && !shape.reduces) return Misfit::reduces;
  return step.completes && !adds ? Misfit::completes : Misfit::none;
}

std::string explain(Misfit misfit, const Step& step, int rank, const Shape& shape) {
  auto outside = [&](const Span& span) {
    const int chunks = shape.chunks_of(rank, span.buffer);
    return "chunks outside 0:" + std::to_string(chunks) +
           (shape.parts && chunks == 1 ? " (here a rank has one part, which is its chunk 0)" : "");
  };
  switch (misfit) {
    case Misfit::none:
      return "";
    case Misfit::source:
      return outside(step.source);
    case Misfit::target:
      return outside(step.target);
    case Misfit::pieces:
      return "goes over the last chunk's end in the scratch buffer";
    case Misfit::lengths:
      return "source and target have different numbers of chunks";
    case Misfit::overlap:
      return "source and target overlap";
    case Misfit::peer:
      return "no such peer among " + std::to_string(shape.size) + " ranks";
    case Misfit::reduces:
      return "reduces in a collective that does not";
    case Misfit::completes:
      return "is marked complete and does not reduce";
  }
  return "";
}

std::string misfit(const Schedule& schedule) {
  Shape shape(schedule.collective, schedule.chunks, schedule.scratch,
              static_cast<int>(schedule.steps.size()));
  for (int r = 0; r < shape.size; ++r) {
    const auto& steps = schedule.steps[static_cast<std::size_t>(r)];
    for (std::size_t k = 0; k < steps.size(); ++k) {
      Misfit misfit = find_misfit(steps[k], r, shape);
      if (misfit == Misfit::none) continue;
      return "rank " + std::to_string(r) + ", step " + std::to_string(k) + " (" +
             to_string(steps[k]) + "): " + explain(misfit, steps[k], r, shape);
    }
  }
  return "";
}

Steps steps_of(const Schedule& schedule, int rank) {
  for (const Step& step : schedule.steps.at(static_cast<std::size_t>(rank))) co_yield step;
}

Schedule make_schedule(const Algorithm& algorithm, int size) {
  Schedule schedule;
  schedule.collective = algorithm.collective();
  schedule.chunks = algorithm.num_chunks(size);
  schedule.scratch = algorithm.num_scratch(size);
  for (int r = 0; r < size; ++r) {
    schedule.steps.push_back(make_plan(algorithm, r, size, 0).steps);
  }
  return schedule;
}

std::string verify(const Schedule& schedule, bool in_place, int filled) {
  if (schedule.steps.size() > kExactRanks) {
    return verify_by_fingerprints(ScheduleView(schedule), static_cast<int>(schedule.steps.size()),
                                  Marks::checked);
  }
  return Execution(schedule, in_place, filled).run();
}

std::string prove(const Schedule& schedule, const Watch& watch) {
  if (schedule.steps.size() > kExactRanks) return verify(schedule, true);
  std::size_t proved = 0;
  // Between two numbers at which a span begins, the same steps are empty. So the greater number is
  // enough. All chunks are first, because their errors are the clearest.
  std::set<int, std::greater<>> numbers{schedule.chunks};
  if (!in_parts(schedule.collective)) {
    for (const auto& steps : schedule.steps) {
      for (const Step& step : steps) {
        for (const Span& span : {step.source, step.target}) {
          const int first = span.first % schedule.chunks;
          if (first > 0) numbers.insert(first);
        }
      }
    }
  }
  for (bool in_place : {false, true}) {
    for (int filled : numbers) {
      if (watch) watch(static_cast<double>(proved++) / static_cast<double>(2 * numbers.size()));
      std::string problem = verify(schedule, in_place, filled);
      if (!problem.empty()) {
        problem = (in_place ? "in place: " : "out of place: ") + problem;
        if (filled == schedule.chunks) return problem;
        return "with " + std::to_string(filled) + " of " + std::to_string(schedule.chunks) +
               " chunks filled, " + problem;
      }
    }
  }
  return "";
}

void mark_complete(Schedule& schedule) {
  for (auto& steps : schedule.steps) {
    for (Step& step : steps) step.completes = false;
  }
  std::vector<std::pair<int, std::size_t>> marks;
  if (schedule.steps.size() > kExactRanks) {
    marks =
        complete_by_fingerprints(ScheduleView(schedule), static_cast<int>(schedule.steps.size()));
  } else {
    Execution execution(schedule, /*in_place=*/false, 0);
    execution.collect_marks(&marks);
    execution.run();
  }
  for (auto [rank, step] : marks) {
    schedule.steps[static_cast<std::size_t>(rank)][step].completes = true;
  }
}

}  // namespace pycollective
