#include "device/executor.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "executor/cut.h"
#include "support/failure.h"
#include "support/round_up.h"
#include "support/tuning.h"

namespace pycollective::device {
namespace {

// A point in a rank's stream.
struct Mark {
  std::shared_ptr<Event> event;
  int device = 0;
  Stream stream = 0;
};

Mark mark(Runtime& runtime, const Share& share) {
  Mark made{runtime.event(share.device, false), share.device, share.stream};
  runtime.record(*made.event, share.device, share.stream);
  return made;
}

// Work on one stream is ordered without events.
void wait(Runtime& runtime, const Share& share, const Mark& mark) {
  if (mark.device == share.device && mark.stream == share.stream) return;
  runtime.wait(*mark.event, share.device, share.stream);
}

// Temporary memory of a device. It is freed in stream order, after the work that the stream has by
// then.
class Temporary {
 public:
  Temporary(Runtime& runtime, const Share& share, std::size_t bytes)
      : runtime_(runtime),
        share_(share),
        memory_(bytes ? runtime.allocate(share.device, bytes, share.stream) : nullptr) {}
  ~Temporary() {
    if (memory_) runtime_.free(share_.device, memory_, share_.stream);
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;
  std::byte* memory() const { return memory_; }

 private:
  Runtime& runtime_;
  const Share& share_;
  std::byte* memory_;
};

// Contiguous memory.
struct Region {
  std::byte* data;
  std::size_t bytes;
};
using Regions = std::vector<Region>;

std::size_t bytes_of(const Regions& regions) {
  std::size_t sum = 0;
  for (const Region& region : regions) sum += region.bytes;
  return sum;
}

// Calls work(places, bytes) for each range that is contiguous in all spans.
void for_each_range(std::vector<Regions> spans,
                    const std::function<void(const std::vector<std::byte*>&, std::size_t)>& work) {
  std::size_t left = bytes_of(spans[0]);
  for (const Regions& span : spans) {
    if (bytes_of(span) != left) {
      throw std::logic_error("a step's source and target differ in length");
    }
  }
  std::vector<std::size_t> next(spans.size());
  std::vector<std::byte*> places(spans.size());
  while (left > 0) {
    std::size_t length = left;
    for (std::size_t i = 0; i < spans.size(); ++i) {
      while (spans[i][next[i]].bytes == 0) ++next[i];
      length = std::min(length, spans[i][next[i]].bytes);
    }
    for (std::size_t i = 0; i < spans.size(); ++i) {
      Region& region = spans[i][next[i]];
      places[i] = region.data;
      region.data += length;
      region.bytes -= length;
    }
    work(places, length);
    left -= length;
  }
}

class Run {
 public:
  Run(Runtime& runtime, const std::vector<Plan>& plans, const Shape& shape,
      const std::vector<Share>& shares)
      : runtime_(runtime), plans_(plans), shape_(shape), shares_(shares), ranks_(plans.size()) {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      const Share& share = shares[r];
      static constexpr Part kNone;
      auto data = [in_parts = !share.input_parts.empty() ||
                              !share.output_parts.empty()](const std::vector<Part>& parts) {
        return !in_parts ? nullptr : parts.empty() ? &kNone : parts.data();
      };
      const Layout layout{shape.count, shape.item, static_cast<int>(plans.size()),
                          data(share.input_parts), data(share.output_parts)};
      ranks_[r].cut.emplace(plans[r], layout);
      auto scratch = static_cast<std::size_t>(plans[r].scratch) * ranks_[r].cut->chunk_bytes();
      has_scratch_ = has_scratch_ || scratch > 0;
      ranks_[r].scratch = std::make_unique<Temporary>(runtime, share, scratch);
    }
    channels_.resize(ranks_.size() * ranks_.size());
  }

  void enqueue() {
    try {
      for (;;) {
        enqueue_block();
        if (ranks_[0].cut->is_last()) break;
        if (has_scratch_) wait_for_readers();  // the next block overwrites scratch
        for (Rank& rank : ranks_) {
          rank.cut->next_block();
          rank.next = 0;
        }
      }
    } catch (...) {
      wait_for_readers();  // the work enqueued so far still uses the ranks' memory
      throw;
    }
    wait_for_readers();
  }

 private:
  struct Message {
    Mark sent;
    Regions data;
  };
  struct Rank {
    std::optional<Cut> cut;
    std::size_t next = 0;  // index of the next step
    std::unique_ptr<Temporary> scratch;
    std::unique_ptr<Mark> present;  // reset when the stream gets more work
    std::vector<std::size_t> readers;
  };

  void enqueue_block() {
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t r = 0; r < ranks_.size(); ++r) {
        const auto& steps = plans_[r].steps;
        for (; ranks_[r].next < steps.size() && try_step(r, steps[ranks_[r].next]); moved = true) {
          ++ranks_[r].next;
        }
      }
    }
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      if (ranks_[r].next < plans_[r].steps.size()) {
        throw std::logic_error("a schedule deadlocked: it was not verified");
      }
    }
  }

  // Makes each rank's stream wait for the ranks that read the rank's memory.
  void wait_for_readers() {
    std::vector<Mark> ends;
    for (std::size_t r = 0; r < ranks_.size(); ++r) ends.push_back(present(r));
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      auto& readers = ranks_[r].readers;
      std::sort(readers.begin(), readers.end());
      readers.erase(std::unique(readers.begin(), readers.end()), readers.end());
      for (std::size_t reader : readers) wait(runtime_, shares_[r], ends[reader]);
    }
  }

  const Mark& present(std::size_t rank) {
    auto& found = ranks_[rank].present;
    if (!found) found = std::make_unique<Mark>(mark(runtime_, shares_[rank]));
    return *found;
  }

  bool try_step(std::size_t rank, const Step& step) {
    auto peer = static_cast<std::size_t>(step.peer);
    switch (step.verb) {
      case Verb::send:
        channels_[rank * ranks_.size() + peer].push_back(
            {present(rank), locate(rank, step.source)});
        return true;
      case Verb::recv:
      case Verb::recv_reduce: {
        auto& channel = channels_[peer * ranks_.size() + rank];
        if (channel.empty()) return false;
        receive(rank, peer, step, channel.front());
        channel.pop_front();
        return true;
      }
      case Verb::copy:
        copy(rank, rank, locate(rank, step.target), locate(rank, step.source));
        return true;
      case Verb::reduce:
        reduce(rank, step, locate(rank, step.target), locate(rank, step.source));
        return true;
    }
    return true;
  }

  void receive(std::size_t rank, std::size_t peer, const Step& step, const Message& message) {
    const Share& share = shares_[rank];
    ranks_[rank].present.reset();
    ranks_[peer].readers.push_back(rank);
    wait(runtime_, share, message.sent);
    Regions target = locate(rank, step.target);
    if (bytes_of(target) != bytes_of(message.data)) {
      std::vector<int> both{static_cast<int>(rank), static_cast<int>(peer)};
      std::sort(both.begin(), both.end());
      throw Failure(FailureKind::mismatch,
                    "rank " + std::to_string(rank) + " expects " +
                        std::to_string(bytes_of(target)) + " bytes from rank " +
                        std::to_string(peer) + ", which sends " +
                        std::to_string(bytes_of(message.data)),
                    std::move(both));
    }
    // reaches() is called for copies too: it enables direct access, so that copies do not pass
    // through the host.
    bool reaches = runtime_.reaches(share.device, shares_[peer].device);
    if (step.verb == Verb::recv) {
      copy(rank, peer, target, message.data);
    } else if (reaches) {
      reduce(rank, step, locate(rank, step.source), message.data);
    } else {
      Temporary staging(runtime_, share, bytes_of(message.data));
      Regions here{{staging.memory(), bytes_of(message.data)}};
      copy(rank, peer, here, message.data);
      reduce(rank, step, locate(rank, step.source), here);
    }
  }

  void copy(std::size_t rank, std::size_t from, const Regions& target, const Regions& source) {
    const Share& share = shares_[rank];
    ranks_[rank].present.reset();
    for_each_range({target, source}, [&](const std::vector<std::byte*>& at, std::size_t bytes) {
      if (at[0] == at[1]) return;
      runtime_.copy(at[0], share.device, at[1], shares_[from].device, bytes, share.stream);
    });
  }

  // target = a (op) b
  void reduce(std::size_t rank, const Step& step, const Regions& a, const Regions& b) {
    const Share& share = shares_[rank];
    ranks_[rank].present.reset();
    int size = step.completes ? static_cast<int>(ranks_.size()) : 0;
    const Reduction& reduction = pycollective::reduction(shape_.dtype, shape_.op);
    // As on hosts, halves are rounded before the division.
    bool divides_later = size && reduction.half && reduction.finish;
    for_each_range({locate(rank, step.target), a, b},
                   [&](const std::vector<std::byte*>& at, std::size_t bytes) {
                     std::size_t items = bytes / shape_.item;
                     void* target = at[0];
                     const void* sources[] = {at[1], at[2]};
                     runtime_.combine(shape_.dtype, shape_.op, &target, 1, sources, 2, items,
                                      divides_later ? 0 : size, share.device, share.stream);
                     if (!divides_later) return;
                     sources[0] = target;
                     runtime_.combine(shape_.dtype, shape_.op, &target, 1, sources, 1, items, size,
                                      share.device, share.stream);
                   });
  }

  Regions locate(std::size_t rank, const Span& span) const {
    const Share& share = shares_[rank];
    const Cut& cut = *ranks_[rank].cut;
    std::byte* memory = span.buffer == Buffer::scratch  ? ranks_[rank].scratch->memory()
                        : span.buffer == Buffer::output ? share.output
                                                        : const_cast<std::byte*>(share.input);
    const std::size_t bytes = cut.bytes_of(span);
    Regions found;
    for (std::size_t done = 0; done < bytes; done += found.back().bytes) {
      const Cut::Bytes place = cut.locate(span, done);
      found.push_back({memory + place.offset, std::min(place.count, bytes - done)});
    }
    return found;
  }

  Runtime& runtime_;
  const std::vector<Plan>& plans_;
  const Shape& shape_;
  const std::vector<Share>& shares_;
  std::vector<Rank> ranks_;
  std::vector<std::deque<Message>> channels_;  // by sender and receiver
  bool has_scratch_ = false;
};

// Runtime::combine() for any number of arrays, in order.
void combine_any(Runtime& runtime, const Shape& shape, std::vector<std::byte*> targets,
                 const std::vector<const std::byte*>& sources, std::size_t count, int size,
                 const Share& on) {
  std::vector<const void*> from(sources.begin(), sources.end());
  auto launch = [&](void* const* to, int num_targets, std::size_t first, std::size_t last,
                    int divided) {
    runtime.combine(shape.dtype, shape.op, to, num_targets, from.data() + first,
                    static_cast<int>(last - first), count, divided, on.device, on.stream);
  };
  // If there are too many sources, temporary memory holds the result of the first ones and becomes
  // a source itself.
  Temporary so_far(runtime, on, from.size() > kMaxArrays ? count * shape.item : 0);
  std::size_t first = 0;
  while (from.size() - first > kMaxArrays) {
    void* to = so_far.memory();
    launch(&to, 1, first, first + kMaxArrays, 0);
    first += kMaxArrays - 1;
    from[first] = to;
  }
  std::vector<void*> to(targets.begin(), targets.end());
  int fit = std::min(static_cast<int>(to.size()), kMaxArrays);
  launch(to.data(), fit, first, from.size(), size);
  for (std::size_t t = static_cast<std::size_t>(fit); t < to.size(); ++t) {
    runtime.copy(to[t], on.device, to[0], on.device, count * shape.item, on.stream);
  }
}

}  // namespace

void run_schedule(Runtime& runtime, const std::vector<Plan>& plans, const Shape& shape,
                  const std::vector<Share>& shares) {
  Run(runtime, plans, shape, shares).enqueue();
}

bool all_reach(Runtime& runtime, const std::vector<Share>& shares) {
  for (const Share& one : shares) {
    for (const Share& other : shares) {
      if (!runtime.reaches(one.device, other.device)) return false;
    }
  }
  return true;
}

void all_reduce_directly(Runtime& runtime, const Shape& shape, const std::vector<Share>& shares) {
  std::map<int, const Share*> leaders;  // by device: the rank whose stream does the device's work
  for (const Share& share : shares) leaders.try_emplace(share.device, &share);
  std::size_t bytes = shape.count * shape.item;
  bool one_shot = leaders.size() == 1 || bytes <= kDeviceOneShotBytes;

  // With one shot, a device may write its outputs before another device has read inputs that
  // overlap them.
  std::vector<std::unique_ptr<Temporary>> copies;
  std::vector<const std::byte*> inputs;
  for (const Share& share : shares) {
    inputs.push_back(share.input);
    if (!one_shot || leaders.size() == 1) continue;
    bool written = std::any_of(shares.begin(), shares.end(), [&](const Share& other) {
      return other.output < share.input + bytes && share.input < other.output + bytes;
    });
    if (!written) continue;
    copies.push_back(std::make_unique<Temporary>(runtime, share, bytes));
    inputs.back() = copies.back()->memory();
    runtime.copy(copies.back()->memory(), share.device, share.input, share.device, bytes,
                 share.stream);
  }
  std::map<std::pair<int, Stream>, const Share*> streams;
  for (const Share& share : shares) streams.try_emplace({share.device, share.stream}, &share);
  std::vector<Mark> starts, ends;
  auto mark_in = [&](std::vector<Mark>& marks, const Share& share) {
    if (streams.size() > 1) marks.push_back(mark(runtime, share));
  };
  for (const auto& [stream, share] : streams) mark_in(starts, *share);
  auto wait_for_ends = [&] {
    for (const auto& [stream, share] : streams) {
      for (const Mark& end : ends) wait(runtime, *share, end);
    }
  };
  try {
    // Align the parts for wide accesses.
    const std::size_t aligned = std::max<std::size_t>(kCacheLine / shape.item, 1);
    const std::size_t part = round_up((shape.count + leaders.size() - 1) / leaders.size(), aligned);
    std::size_t k = 0;
    for (const auto& [device, leader] : leaders) {
      std::size_t first = one_shot ? 0 : std::min(k++ * part, shape.count);
      std::size_t count = one_shot ? shape.count : std::min(part, shape.count - first);
      if (count == 0) continue;
      for (const Mark& start : starts) wait(runtime, *leader, start);
      std::vector<const std::byte*> sources;
      std::vector<std::byte*> targets;
      for (std::size_t r = 0; r < shares.size(); ++r) {
        sources.push_back(inputs[r] + first * shape.item);
        std::byte* target = shares[r].output + first * shape.item;
        bool known = std::find(targets.begin(), targets.end(), target) != targets.end();
        if (!known && (!one_shot || shares[r].device == device)) targets.push_back(target);
      }
      combine_any(runtime, shape, targets, sources, count, static_cast<int>(shares.size()),
                  *leader);
      mark_in(ends, *leader);
    }
  } catch (...) {
    wait_for_ends();
    throw;
  }
  wait_for_ends();
}

}  // namespace pycollective::device
