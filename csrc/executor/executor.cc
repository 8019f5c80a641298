#include "executor/executor.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>

#include "support/round_up.h"

namespace pycollective {
namespace {

// Chunks begin at multiples of this many bytes, so that ranks do not write to one cache line.
constexpr std::size_t kChunkAlignment = 64;

void run_on_threads(const std::vector<const Plan*>& plans, const std::vector<Buffers>& buffers,
                    const CallRecord& call, const std::vector<Endpoint*>& endpoints,
                    Clock::time_point deadline, const Interrupt& interrupt) {
  std::size_t ranks = plans.size();
  std::vector<std::exception_ptr> errors(ranks);
  auto run = [&](std::size_t r, const Interrupt& check) {
    try {
      run_blocking(*plans[r], buffers[r], call, *endpoints[r], deadline,
                   [&check](const std::vector<int>&) {
                     if (check) check();
                   });
    } catch (...) {
      errors[r] = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> threads;  // joined before the errors are looked at
    for (std::size_t r = 1; r < ranks; ++r) threads.emplace_back(run, r, Interrupt());
    run(0, interrupt);
  }
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace

namespace {

// Items of a full block: a segment of every chunk, or of every part.
std::size_t block_items(const Plan& plan, const Buffers& buffers, std::size_t segment_bytes) {
  if (buffers.pairwise) return buffers.count;
  std::size_t segment = std::max(segment_bytes / buffers.item, kChunkAlignment);
  return buffers.input_parts ? segment : segment * static_cast<std::size_t>(plan.chunks);
}

// Items of a chunk in a block of `items`.
std::size_t chunk_items(const Plan& plan, const Buffers& buffers, std::size_t items) {
  std::size_t aligned = std::max<std::size_t>(kChunkAlignment / buffers.item, 1);
  auto chunks = buffers.input_parts ? 1 : static_cast<std::size_t>(plan.chunks);
  return round_up((items + chunks - 1) / chunks, aligned);
}

}  // namespace

std::byte* Scratch::at_least(std::size_t bytes) {
  std::size_t lines = (bytes + sizeof(Line) - 1) / sizeof(Line);
  if (lines > count_) {
    lines_.reset(new Line[lines]);
    count_ = lines;
  }
  return reinterpret_cast<std::byte*>(lines_.get());
}

Execution::Execution(const Plan& plan, const Buffers& buffers, Endpoint& endpoint,
                     std::size_t segment_bytes)
    : plan_(plan),
      buffers_(buffers),
      endpoint_(endpoint),
      block_items_(block_items(plan, buffers, segment_bytes)) {
  start_block();
  if (plan.scratch) {  // the first block is the longest
    auto chunks = static_cast<std::size_t>(plan.scratch);
    scratch_ = buffers.scratch->at_least(chunks * chunk_items_ * buffers.item);
  }
}

void Execution::start_block() {
  block_begin_ = block_end_;
  std::size_t items = std::min(block_items_, buffers_.count - block_begin_);
  block_end_ = block_begin_ + items;
  chunk_items_ = chunk_items(plan_, buffers_, items);
  next_ = 0;
}

Execution::Bytes Execution::locate(const Span& span) const {
  if (span.count == 0) return {0, 0};
  auto first = static_cast<std::size_t>(span.first), count = static_cast<std::size_t>(span.count);
  std::size_t items = block_end_ - block_begin_;
  if (buffers_.input_parts) {
    if (span.buffer == Buffer::scratch) return {first * chunk_items_ * buffers_.item, items};
    const Part* parts = span.buffer == Buffer::input ? buffers_.input_parts : buffers_.output_parts;
    const Part& part = parts[first];
    std::size_t begin = std::min(block_begin_, part.count), end = std::min(block_end_, part.count);
    return {(part.first + begin) * buffers_.item, end - begin};
  }
  std::size_t offset = first * chunk_items_;
  if (span.buffer == Buffer::scratch) {
    first %= static_cast<std::size_t>(plan_.chunks);
  } else {
    offset = std::min(offset, items) + block_begin_;
  }
  std::size_t begin = std::min(first * chunk_items_, items);
  std::size_t end = std::min((first + count) * chunk_items_, items);
  return {offset * buffers_.item, end - begin};
}

std::byte* Execution::memory(Buffer buffer) const {
  if (buffer == Buffer::scratch) return scratch_;
  return buffer == Buffer::output ? buffers_.output : const_cast<std::byte*>(buffers_.input);
}

Progress Execution::advance() {
  Progress progress = Progress::blocked;
  endpoint_.progress();
  for (;;) {
    while (next_ < plan_.steps.size()) {
      if (!try_step(plan_.steps[next_])) return progress;
      ++next_;
      progress = Progress::moved;
    }
    bool last = block_end_ == buffers_.count;
    // Scratch is written anew in each block, and no schedule says who has read the old one.
    if ((last || plan_.scratch) && !endpoint_.flushed()) return progress;
    if (last) return Progress::done;
    start_block();
  }
}

bool Execution::try_step(const Step& step) {
  bool receives = step.verb == Verb::recv || step.verb == Verb::recv_reduce;
  const Span& moved = step.verb == Verb::send ? step.source : step.target;
  Bytes at = locate(moved);
  // Nothing to move: the other side knows it too, unless the step is a bare signal.
  if (at.count == 0 && moved.count != 0 && !buffers_.pairwise) return true;
  const std::byte* source = memory(step.source.buffer) + locate(step.source).offset;
  if (step.verb == Verb::send)
    return endpoint_.try_send(step.peer, source, at.count * buffers_.item);
  std::byte* target = memory(step.target.buffer) + at.offset;
  if (receives) {
    // A message may come in parts; what was received of it is kept from call to call.
    do {
      std::size_t left = at.count * buffers_.item - received_;
      std::byte* into = target + received_;
      bool reduces = step.verb == Verb::recv_reduce;
      Piece part = reduces ? endpoint_.try_receive(step.peer, left)
                           : endpoint_.try_receive_into(step.peer, left, into);
      if (!part.data) return false;
      if (reduces) {
        buffers_.reduction->combine(into, source + received_, part.data,
                                    part.bytes / buffers_.item);
      } else if (part.bytes && part.data != into) {
        std::memcpy(into, part.data, part.bytes);
      }
      endpoint_.release(step.peer);
      received_ += part.bytes;
    } while (received_ < at.count * buffers_.item);
    received_ = 0;
  } else if (step.verb == Verb::reduce) {
    buffers_.reduction->combine(target, target, source, at.count);
  } else if (target != source && at.count) {
    std::memmove(target, source, at.count * buffers_.item);
  }
  if (step.completes && buffers_.reduction->finish) {
    buffers_.reduction->finish(target, at.count, buffers_.size);
  }
  return true;
}

void abandon(Endpoint& endpoint, const CallRecord& call) noexcept {
  endpoint.fail(FailureKind::aborted, "rank " + std::to_string(endpoint.rank()) + " left " +
                                          call.collective + " because of an error of its own");
  endpoint.leave();
}

std::vector<int> Execution::awaited() const {
  if (next_ < plan_.steps.size()) return {plan_.steps[next_].peer};
  std::vector<int> found;  // those that have not read what they were sent
  for (const Step& step : plan_.steps) {
    bool waits = step.verb == Verb::send && !endpoint_.flushed_to(step.peer);
    if (waits && std::find(found.begin(), found.end(), step.peer) == found.end()) {
      found.push_back(step.peer);
    }
  }
  return found;
}

void run_blocking(const Plan& plan, const Buffers& buffers, const CallRecord& call,
                  Endpoint& endpoint, Clock::time_point deadline, const LookUp& look_up) {
  endpoint.check();
  endpoint.enter(call);
  try {
    Execution execution(plan, buffers, endpoint);
    if (execution.advance() != Progress::done) {
      endpoint.wait([&] { return execution.advance(); }, deadline,
                    [&] { look_up(execution.awaited()); });
    }
  } catch (...) {
    abandon(endpoint, call);
    throw;
  }
  endpoint.leave();
}

void run_together(const std::vector<const Plan*>& plans, const std::vector<Buffers>& buffers,
                  const CallRecord& call, const std::vector<Endpoint*>& endpoints,
                  Clock::time_point deadline, const Interrupt& interrupt) {
  std::size_t ranks = plans.size();
  if (buffers[0].count * buffers[0].item >= kTogetherThreadsFrom) {
    run_on_threads(plans, buffers, call, endpoints, deadline, interrupt);
    return;
  }
  std::size_t entered = 0;
  try {
    std::vector<Execution> executions;
    executions.reserve(ranks);
    for (; entered < ranks; ++entered) {
      endpoints[entered]->check();
      endpoints[entered]->enter(call);
      executions.emplace_back(*plans[entered], buffers[entered], *endpoints[entered]);
    }
    for (std::size_t done = 0; done < ranks;) {
      done = 0;
      bool moved = false;
      for (Execution& execution : executions) {
        Progress progress = execution.advance();
        moved = moved || progress != Progress::blocked;
        done += progress == Progress::done;
      }
      if (!moved) throw std::logic_error("a schedule came to a stop; was it verified?");
    }
  } catch (...) {
    for (std::size_t r = 0; r < entered; ++r) abandon(*endpoints[r], call);
    throw;
  }
  for (Endpoint* endpoint : endpoints) endpoint->leave();
}

}  // namespace pycollective
