#include "executor/executor.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "support/reserve.h"

namespace pycollective {
namespace {

// Returns false and does nothing if the system refuses to start a thread for each rank.
bool run_on_threads(const std::vector<const Plan*>& plans, const std::vector<Buffers>& buffers,
                    const CallRecord& call, const std::vector<Endpoint*>& endpoints,
                    Clock::time_point deadline, const Interrupt& interrupt) {
  std::size_t ranks = plans.size();
  std::vector<std::exception_ptr> errors(ranks);
  auto run = [&](std::size_t r, const Interrupt& check) {
    try {
      run_blocking(*plans[r], buffers[r], call, *endpoints[r], deadline,
                   [&check](const std::vector<int>&, bool) {
                     if (check) check();
                   });
    } catch (...) {
      errors[r] = std::current_exception();
    }
  };
  enum { undecided, begin, give_up };
  std::atomic<int> decision{undecided};  // no rank may begin before all threads have started
  auto decide = [&](int chosen) {
    decision.store(chosen);
    decision.notify_all();
  };
  {
    std::vector<std::jthread> threads;  // joined before the errors are read
    try {
      for (std::size_t r = 1; r < ranks; ++r) {
        threads.emplace_back([&, r] {
          decision.wait(undecided);
          if (decision.load() == begin) run(r, Interrupt());
        });
      }
    } catch (const std::system_error&) {
      decide(give_up);
      return false;
    } catch (...) {
      decide(give_up);
      throw;
    }
    decide(begin);
    run(0, interrupt);
  }
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return true;
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
    : plan_(plan), buffers_(buffers), cut_(plan, buffers, segment_bytes), endpoint_(endpoint) {
  if (plan.scratch || plan.packed) {
    std::size_t scratch = static_cast<std::size_t>(plan.scratch) * cut_.chunk_bytes();
    std::size_t packing = static_cast<std::size_t>(plan.packed) * cut_.chunk_bytes();
    scratch_ = buffers.scratch->at_least(scratch + packing);
    packing_ = scratch_ + scratch;
  }
}

std::byte* Execution::memory(Buffer buffer) const {
  if (buffer == Buffer::scratch) return scratch_;
  return buffer == Buffer::output ? buffers_.output : const_cast<std::byte*>(buffers_.input);
}

Progress Execution::advance() {
  Progress progress = Progress::blocked;
  worked_ = 0;
  endpoint_.progress();
  for (;;) {
    while (next_ < plan_.steps.size()) {
      if (worked_ >= kPieceBytes) return Progress::moved;
      if (!try_step(plan_.steps[next_])) return worked_ ? Progress::moved : progress;
      ++next_;
      progress = Progress::moved;
    }
    const bool last = cut_.is_last();
    // The next block overwrites scratch and packed data, which a peer may still read.
    if ((last || scratch_) && !endpoint_.flushed()) return progress;
    if (last) return Progress::done;
    cut_.next_block();
    next_ = packed_ = 0;
  }
}

bool Execution::try_step(const Step& step) {
  const Span& moved = step.verb == Verb::send ? step.source : step.target;
  std::size_t bytes = cut_.bytes_of(moved);
  // The peer skips an empty message too. A step without chunks is a signal, and is sent.
  if (bytes == 0 && moved.count != 0 && !buffers_.pairwise) return true;
  switch (step.verb) {
    case Verb::send:
      return try_send(step, bytes);
    case Verb::recv:
    case Verb::recv_reduce:
      return try_receive(step, bytes);
    case Verb::copy:
    case Verb::reduce:
      work(step, 0, bytes, nullptr);
      worked_ += bytes;
  }
  return true;
}

bool Execution::try_send(const Step& step, std::size_t bytes) {
  Cut::Bytes place = cut_.locate(step.source);
  const std::byte* data = at(step.source, place);
  if (place.count < bytes) {
    std::byte* packed = packing_ + packed_;
    data = packed;
    for (std::size_t done = 0; !is_packed_ && done < bytes; done += place.count) {
      place = cut_.locate(step.source, done);
      std::memcpy(packed + done, at(step.source, place), place.count);
    }
    is_packed_ = true;
  }
  if (!endpoint_.try_send(step.peer, data, bytes)) return false;
  if (is_packed_) packed_ += bytes;
  is_packed_ = false;
  worked_ += bytes;
  return true;
}

bool Execution::try_receive(const Step& step, std::size_t bytes) {
  // A message may arrive in parts. received_ counts them across calls of this function.
  do {
    if (worked_ >= kPieceBytes) return false;
    std::size_t left = bytes - received_;
    Cut::Bytes place = cut_.locate(step.target, received_);
    Piece part = step.verb == Verb::recv && place.count >= left
                     ? endpoint_.try_receive_into(step.peer, left, at(step.target, place))
                     : endpoint_.try_receive(step.peer, left);
    if (!part.data) return false;
    work(step, received_, part.bytes, part.data);
    endpoint_.release(step.peer);
    received_ += part.bytes;
    worked_ += part.bytes;
  } while (received_ < bytes);
  received_ = 0;
  return true;
}

void Execution::work(const Step& step, std::size_t first, std::size_t bytes, const void* received) {
  const auto* from = static_cast<const std::byte*>(received);
  while (bytes > 0) {
    Cut::Bytes place = cut_.locate(step.target, first);
    std::byte* target = at(step.target, place);
    std::size_t length = std::min(place.count, bytes);
    const std::byte* source = from;
    if (step.verb != Verb::recv) {
      Cut::Bytes own = cut_.locate(step.source, first);
      source = at(step.source, own);
      length = std::min(length, own.count);
    }
    if (length == 0) throw std::logic_error("the source and the target of a step differ in length");
    std::size_t items = length / buffers_.item;
    if (step.verb == Verb::recv_reduce) {
      buffers_.reduction->combine(target, source, from, items);
    } else if (step.verb == Verb::reduce) {
      buffers_.reduction->combine(target, target, source, items);
    } else if (target != source) {
      std::memmove(target, source, length);
    }
    if (step.completes && buffers_.reduction->finish) {
      buffers_.reduction->finish(target, items, buffers_.size);
    }
    first += length;
    bytes -= length;
    if (from) from += length;
  }
}

void abandon(Endpoint& endpoint, const CallRecord& call) noexcept {
  use_reserve();
  endpoint.mark_reported();
  endpoint.fail({FailureKind::aborted,
                 "rank " + std::to_string(endpoint.rank()) + " left " + call.collective +
                     " because of an error of its own",
                 {endpoint.rank()},
                 {endpoint.call().describe()}});
  endpoint.leave();
}

std::vector<int> Execution::awaited() const {
  if (next_ < plan_.steps.size()) return {plan_.steps[next_].peer};
  std::vector<int> found;  // the peers that have not read all messages
  for (const Step& step : plan_.steps) {
    bool waits = step.verb == Verb::send && !endpoint_.flushed_to(step.peer);
    if (waits && std::find(found.begin(), found.end(), step.peer) == found.end()) {
      found.push_back(step.peer);
    }
  }
  return found;
}

bool wait_for(Endpoint& endpoint, const std::function<Progress()>& attempt,
              Clock::time_point deadline, const std::function<std::vector<int>()>& awaited,
              const CheckPeers& check_peers) {
  bool moved = false;
  std::uint64_t before = endpoint.moved();
  auto watched = [&] {
    Progress progress = attempt();
    moved = moved || progress == Progress::moved;
    return progress;
  };
  return endpoint.wait(watched, deadline, [&] {
    std::uint64_t now = endpoint.moved();
    endpoint.set_awaited(awaited());
    check_peers(endpoint.awaited(),
                std::exchange(moved, false) || now != std::exchange(before, now));
  });
}

void run_blocking(const Plan& plan, const Buffers& buffers, const CallRecord& call,
                  Endpoint& endpoint, Clock::time_point deadline, const CheckPeers& check_peers) {
  enter(endpoint, call);
  try {
    Execution execution(plan, buffers, endpoint);
    const bool is_done = execution.advance() == Progress::done ||
                         wait_for(
                             endpoint, [&] { return execution.advance(); }, deadline,
                             [&] { return execution.awaited(); }, check_peers);
    if (!is_done) endpoint.time_out();
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
  if (buffers[0].count * buffers[0].item >= kTogetherThreadsFrom &&
      run_on_threads(plans, buffers, call, endpoints, deadline, interrupt)) {
    return;
  }
  std::size_t entered = 0;
  try {
    std::vector<Execution> executions;
    executions.reserve(ranks);
    for (; entered < ranks; ++entered) {
      enter(*endpoints[entered], call);
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
      if (!moved)
        throw std::logic_error(
            "the schedule deadlocks: no rank can take its next step; verify it first");
    }
  } catch (...) {
    for (std::size_t r = 0; r < entered; ++r) abandon(*endpoints[r], call);
    throw;
  }
  for (Endpoint* endpoint : endpoints) endpoint->leave();
}

}  // namespace pycollective
