#include "device/call_matcher.h"

#include <exception>
#include <stdexcept>
#include <string>

namespace pycollective::device {

CallMatcher::CallMatcher(std::shared_ptr<Group> group, std::shared_ptr<Runtime> runtime)
    : group_(std::move(group)),
      runtime_(std::move(runtime)),
      posted_(static_cast<std::size_t>(group_->size())) {}

void CallMatcher::check() const {
  if (auto failure = group_->failure()) throw *failure;
}

void CallMatcher::begin(int rank, Operation& operation) {
  const Share& share = operation.share;
  try {
    if (operation.after) {
      std::unique_ptr<Event> before = runtime_->event(share.device, false);
      runtime_->record(*before, share.device, *operation.after);
      runtime_->wait(*before, share.device, share.stream);
    }
    if (operation.timed) {
      operation.begin_ = runtime_->event(share.device, true);
      runtime_->record(*operation.begin_, share.device, share.stream);
    }
  } catch (const std::exception& error) {
    fail(rank, operation, error);
  }
}

void CallMatcher::post(int rank, const std::shared_ptr<Operation>& operation) {
  std::lock_guard lock(mutex_);
  check();
  operation->posted_ = true;
  operation->turn_ = posted_[static_cast<std::size_t>(rank)]++;
  auto ahead = static_cast<std::size_t>(operation->turn_ - first_);
  if (ahead == turns_.size()) turns_.push_back({Operations(posted_.size()), 0});
  Turn& turn = turns_[ahead];
  turn.operations[static_cast<std::size_t>(rank)] = operation;
  if (++turn.posted < group_->size()) return;
  // This is turns_.front(): all ranks have posted this call, so all have posted every earlier call.
  Turn whole = std::move(turn);
  turns_.pop_front();
  ++first_;
  match(whole.operations);
}

void CallMatcher::match(const Operations& operations) {
  const Operation& one = *operations[0];
  std::vector<Share> shares;
  for (std::size_t r = 0; r < operations.size(); ++r) {
    const CallRecord& other = operations[r]->record;
    if (other.identity != one.record.identity) {
      group_->fail(mismatch_failure(group_->titled(0), {one.record},
                                    group_->titled(static_cast<int>(r)), {other}));
      check();
    }
    shares.push_back(operations[r]->share);
  }
  try {
    if (one.shape.count > 0) enqueue(one, shares);
    mark_ends(operations);
  } catch (const std::exception& error) {
    const auto* failure = dynamic_cast<const Failure*>(&error);
    group_->fail(
        failure ? *failure
                : Failure(FailureKind::aborted,
                          one.record.describe() +
                              " could not be enqueued on devices for all ranks: " + error.what(),
                          {}, {one.record.describe()}));
    try {
      mark_ends(operations);  // for the work that was enqueued
    } catch (const std::exception&) {
      // A device has failed, and executes nothing any more.
    }
    check();
  }
  for (const auto& operation : operations)
    operation->is_enqueued_.store(true, std::memory_order_release);
}

void CallMatcher::mark_ends(const Operations& operations) {
  for (const auto& operation : operations) {
    const Share& share = operation->share;
    std::unique_ptr<Event> end = runtime_->event(share.device, operation->timed);
    runtime_->record(*end, share.device, share.stream);
    operation->end_ = std::move(end);
  }
}

bool CallMatcher::over(int rank, const Operation& operation) {
  std::lock_guard lock(mutex_);
  if (!operation.end_) return !operation.posted_ || group_->failure().has_value();
  try {
    return runtime_->over(*operation.end_);
  } catch (const std::exception& error) {
    fail(rank, operation, error);
  }
}

std::optional<std::pair<double, double>> CallMatcher::times(int rank, const Operation& operation,
                                                            const Event& first) {
  if (!operation.timed || !operation.is_enqueued() || !over(rank, operation)) return std::nullopt;
  try {
    double begin = runtime_->seconds_between(first, *operation.begin_);
    return std::pair{begin, begin + runtime_->seconds_between(*operation.begin_, *operation.end_)};
  } catch (const std::exception& error) {
    fail(rank, operation, error);
  }
}

void CallMatcher::order(int rank, const Operation& operation, Stream stream) {
  try {
    runtime_->wait(*operation.end_, operation.share.device, stream);
  } catch (const std::exception& error) {
    fail(rank, operation, error);
  }
}

void CallMatcher::fail(int rank, const Operation& operation, const std::exception& error) {
  group_->fail({FailureKind::aborted,
                "rank " + std::to_string(rank) + ": device " +
                    std::to_string(operation.share.device) + " failed in " +
                    operation.record.describe() + " or before it: " + error.what(),
                {rank},
                {operation.record.describe()}});
  check();
  throw;  // NOLINT: unreachable, because check() throws the group's failure
}

void CallMatcher::enqueue(const Operation& one, const std::vector<Share>& shares) {
  if (one.algorithm) {
    run_schedule(*runtime_, plans(*one.algorithm, one), one.shape, shares);
  } else if (all_reach(*runtime_, shares)) {
    all_reduce_directly(*runtime_, one.shape, shares);
  } else {
    const Algorithm& found = select(Collective::all_reduce, one.shape.count * one.shape.item,
                                    group_->size(), kTransport);
    run_schedule(*runtime_, plans(found, one), one.shape, shares);
  }
}

const std::vector<Plan>& CallMatcher::plans(const Algorithm& algorithm, const Operation& one) {
  auto [place, added] = plans_.try_emplace({&algorithm, one.root});
  if (added) {
    place->second.kept = one.kept;
    for (int r = 0; r < group_->size(); ++r) {
      place->second.plans.push_back(make_plan(algorithm, r, group_->size(), one.root));
    }
  }
  return place->second.plans;
}

std::vector<int> CallMatcher::absent(const Operation& operation) {
  std::lock_guard lock(mutex_);
  std::vector<int> found;
  for (std::size_t r = 0; r < posted_.size(); ++r) {
    if (posted_[r] <= operation.turn_) found.push_back(static_cast<int>(r));
  }
  return found;
}

Caller::Caller(Communicator& communicator, std::shared_ptr<CallMatcher> matcher)
    : communicator_(communicator), matcher_(std::move(matcher)) {
  if (&communicator.group() != &matcher_->group()) {
    throw std::invalid_argument("the matcher belongs to another group");
  }
}

void Caller::call(const std::shared_ptr<Operation>& operation, bool later,
                  const Interrupt& interrupt) {
  communicator_.wait_for_tasks(interrupt);
  int rank = communicator_.rank();
  Group& group = communicator_.group();
  Endpoint& endpoint = group.endpoint(rank);
  enter(endpoint, operation->record);
  try {
    operation->record.number = group.calls(rank);
    matcher_->begin(rank, *operation);
    last_ = operation;
    matcher_->post(rank, operation);
    if (operation->is_enqueued()) {
      endpoint.board()->wake_others();
    } else if (!later) {
      wait(*operation, interrupt);
    }
  } catch (...) {
    abandon(endpoint, operation->record);
    matcher_->wait_for_users();
    throw;
  }
  endpoint.leave();
}

void Caller::finish(Operation& operation, const Interrupt& interrupt) {
  if (operation.is_enqueued()) return;
  try {
    wait(operation, interrupt);
  } catch (const Failure&) {
    communicator_.group().endpoint(communicator_.rank()).mark_reported();
    matcher_->wait_for_users();
    throw;
  }
}

void Caller::wait(Operation& operation, const Interrupt& interrupt) {
  int rank = communicator_.rank();
  Group& group = communicator_.group();
  Waiting waiting{operation.began, operation.deadline, interrupt};
  LongWait wait(communicator_.warning(), group, rank, waiting);
  bool late = false;
  auto check_peers = [&] {
    std::vector<int> absent = matcher_->absent(operation);
    wait.check(absent, false);
    // The first time, return: a comparison of the ranks' calls may find a mismatch, which explains
    // more than a timeout.
    if (absent.empty() || Clock::now() < operation.deadline || !std::exchange(late, true)) return;
    std::string text = "rank " + std::to_string(rank) + " waited until its deadline for " +
                       operation.record.describe() + ", to which not all ranks have come: ";
    for (std::size_t i = 0; i < absent.size(); ++i) {
      text += (i ? "; " : "") + group.describe(absent[i]);
    }
    group.fail({FailureKind::timeout, text, absent, {operation.record.describe()}});
    group.endpoint(rank).check();
  };
  group.endpoint(rank).wait(
      [&] { return operation.is_enqueued() ? Progress::done : Progress::blocked; },
      Clock::time_point::max(), check_peers);
}

void Caller::leave() noexcept {
  if (!last_ || last_->is_enqueued()) return;
  communicator_.group().fail({FailureKind::aborted,
                              "rank " + std::to_string(communicator_.rank()) +
                                  " deleted its communicator before its calls were done",
                              {communicator_.rank()}});
  matcher_->wait_for_users();
}

}  // namespace pycollective::device
