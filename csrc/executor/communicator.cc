#include "executor/communicator.h"

#include <algorithm>
#include <new>
#include <utility>

#include "support/parallel.h"
#include "support/reserve.h"

namespace pycollective {
namespace {

constexpr std::uint64_t kOddFactor = 0x9e3779b97f4a7c15;

}  // namespace

CallRecord record_of(const Algorithm& algorithm, const Array& array, int root) {
  CallRecord call;
  set_name(call.collective, to_string(algorithm.collective()));
  set_name(call.algorithm, algorithm.name());
  set_name(call.dtype, array.type);
  call.root = has_root(algorithm.collective()) ? root : -1;
  call.detail = algorithm.fingerprint();
  for (std::size_t i = sizeof call.dtype - 1; i < array.type.size(); ++i) {  // not in the record
    call.detail = call.detail * kOddFactor + static_cast<unsigned char>(array.type[i]);
  }
  call.dims = static_cast<int>(array.shape.size());
  for (int i = 0; i < std::min(call.dims, CallRecord::kMaxDims); ++i) {
    call.shape[i] = array.shape[static_cast<std::size_t>(i)];
  }
  for (int i = CallRecord::kMaxDims; i < call.dims; ++i) {  // not in the record
    call.detail = call.detail * kOddFactor +
                  static_cast<std::uint64_t>(array.shape[static_cast<std::size_t>(i)]);
  }
  call.seal();
  return call;
}

PreparedCall with_arrays(PreparedCall prepared, const void* input, void* output) {
  prepared.direct.input = prepared.buffers.input = static_cast<const std::byte*>(input);
  prepared.direct.output = prepared.buffers.output = static_cast<std::byte*>(output);
  return prepared;
}

std::vector<Part> contiguous_parts(const std::vector<std::size_t>& counts) {
  std::vector<Part> parts;
  std::size_t first = 0;
  for (std::size_t count : counts) {
    parts.push_back({first, count});
    first += count;
  }
  return parts;
}

Communicator::Communicator(std::shared_ptr<Group> group, int rank)
    : group_(std::move(group)), rank_(rank), among_threads_(group_->transport() == "threads") {
  keep_reserve();
}

Endpoint& Communicator::endpoint() {
  if (!endpoint_) endpoint_ = &group_->endpoint(rank_);
  return *endpoint_;
}

const Algorithm& Communicator::hierarchical() const {
  std::lock_guard lock(plans_mutex_);
  if (!hierarchical_) hierarchical_ = std::make_shared<const Hierarchical>(group_->hosts());
  return *hierarchical_;
}

bool Communicator::has_levels() const {
  std::vector<int> hosts = group_->hosts();
  int last = *std::max_element(hosts.begin(), hosts.end());
  return last > 0 && last + 1 < size();
}

const Algorithm& Communicator::select(Collective collective, std::size_t bytes) const {
  for (const Choice& choice : choices_) {
    if (choice.collective == collective && bytes <= choice.most_bytes) return *choice.algorithm;
  }
  if (collective == Collective::all_reduce && has_levels()) return hierarchical();
  return pycollective::select(collective, bytes, size(), group_->transport());
}

bool Communicator::uses_direct_path(const Algorithm& algorithm) {
  const Collective collective = algorithm.collective();
  return static_cast<int>(collective) < kDirectCollectives &&
         &algorithm == &direct_algorithm(collective) && has_board();
}

int Communicator::held_polls(std::size_t bytes) {
  if (bytes > (among_threads_ ? kOneShotBytes : kHeldBytes)) return 0;
  // Peers that are threads need the GIL, and peers on other hosts take longer.
  if (among_threads_ || !has_board()) return 1;
  return group_->is_oversubscribed() ? kOversubscribedSpins : kHeldSpins;
}

PreparedCall Communicator::record(const Algorithm& algorithm, const Array& array, int root,
                                  const Reducing* reducing) {
  PreparedCall prepared;
  prepared.record = record_of(algorithm, array, root);
  if (!reducing) return prepared;
  set_name(prepared.record.op, to_string(reducing->op));
  if (reducing->reproducible) prepared.record.name_reproducible();
  prepared.record.seal();
  return prepared;
}

PreparedCall Communicator::prepare(const Algorithm& algorithm, const Array& array, int root,
                                   const Reducing* reducing) {
  const Reduction* combined = reducing ? &reduction(reducing->dtype, reducing->op) : nullptr;
  PreparedCall prepared = record(algorithm, array, root, reducing);
  if (uses_direct_path(algorithm)) {
    DirectCall& direct = prepared.direct;
    direct.collective = algorithm.collective();
    direct.root = root;
    direct.input = static_cast<const std::byte*>(array.input);
    direct.output = static_cast<std::byte*>(array.output);
    direct.count = array.count;
    direct.item = array.item;
    direct.reduction = combined;
    if (reducing) {
      direct.dtype = reducing->dtype;
      direct.op = reducing->op;
      direct.fused = !reducing->reproducible;
    }
    return prepared;
  }
  prepared.buffers = buffers_of(array, combined);
  if (in_parts(algorithm.collective())) {
    const std::vector<std::size_t> counts(static_cast<std::size_t>(size()), array.count);
    set_parts(prepared, algorithm, root, contiguous_parts(counts), {0, array.count});
  }
  set_plan(prepared, algorithm, root);
  return prepared;
}

PreparedCall Communicator::prepare(const Algorithm& algorithm, const Array& array,
                                   const std::vector<std::size_t>& counts, int root) {
  PreparedCall prepared = record(algorithm, array, root, nullptr);
  prepared.buffers = buffers_of(array, nullptr);
  prepared.buffers.count = *std::max_element(counts.begin(), counts.end());
  set_parts(prepared, algorithm, root, contiguous_parts(counts),
            {0, counts[static_cast<std::size_t>(rank_)]});
  set_plan(prepared, algorithm, root);
  return prepared;
}

PreparedCall Communicator::prepare_all_to_all(const Array& array,
                                              const std::vector<std::size_t>& input_counts,
                                              const std::vector<std::size_t>& output_counts) {
  PreparedCall prepared = record(direct_all_to_all(), array, 0, nullptr);
  prepared.buffers = buffers_of(array, nullptr);
  std::vector<Part> parts = contiguous_parts(input_counts),
                    received = contiguous_parts(output_counts);
  parts.insert(parts.end(), received.begin(), received.end());
  prepared.parts = std::make_shared<const std::vector<Part>>(std::move(parts));
  prepared.buffers.input_parts = prepared.parts->data();
  prepared.buffers.output_parts = prepared.parts->data() + input_counts.size();
  prepared.buffers.count = std::max(*std::max_element(input_counts.begin(), input_counts.end()),
                                    *std::max_element(output_counts.begin(), output_counts.end()));
  prepared.buffers.pairwise = true;
  set_plan(prepared, direct_all_to_all(), 0);
  if (!uses_direct_path(direct_all_to_all())) return prepared;
  auto are_equal = [&](const std::vector<std::size_t>& counts) {
    return std::ranges::all_of(counts, [&](std::size_t n) { return n == input_counts[0]; });
  };
  DirectCall& direct = prepared.direct;
  direct.collective = Collective::all_to_all;
  direct.input = prepared.buffers.input;
  direct.output = prepared.buffers.output;
  direct.item = array.item;
  direct.parts = Parts::different;
  if (are_equal(input_counts) && are_equal(output_counts)) {
    direct.parts = Parts::own_equal;
    direct.count = input_counts[0];
  }
  return prepared;
}

PreparedCall Communicator::prepare_barrier() {
  return prepare(dissemination_barrier(), {}, 0, nullptr);
}

void Communicator::set_parts(PreparedCall& prepared, const Algorithm& algorithm, int root,
                             std::vector<Part> parts, Part single) {
  // Chunk i is the part of the rank that has number i in the schedule.
  std::rotate(parts.begin(), parts.begin() + root, parts.end());
  parts.push_back(single);
  prepared.parts = std::make_shared<const std::vector<Part>>(std::move(parts));
  const int number = (rank_ - root + size()) % size();
  auto parts_for = [&](int count) {
    return count == 1 ? &prepared.parts->back() : prepared.parts->data();
  };
  const Collective collective = algorithm.collective();
  prepared.buffers.input_parts = parts_for(input_chunks(collective, size(), number, size()));
  prepared.buffers.output_parts = parts_for(output_chunks(collective, size(), number, size()));
}

void Communicator::set_plan(PreparedCall& prepared, const Algorithm& algorithm, int root) {
  Buffers& buffers = prepared.buffers;
  if (buffers.item == 0) {  // items of 0 bytes: nothing to move
    buffers.item = 1;
    buffers.count = 0;
    buffers.pairwise = false;
  }
  prepared.plan = &plan(algorithm, root, buffers.pairwise ? 1 : buffers.count);
}

// Making calls ---------------------------------------------------------------------------------

Progress Communicator::advance() {
  if (auto* direct = std::get_if<DirectExecution>(&execution_)) {
    const Progress progress = direct->advance();
    if (progress != Progress::done || !direct->parts_differ()) return progress;
    // The board has moved no part, because the ranks' parts differ.
    execution_.emplace<Execution>(*plan_, buffers_, endpoint());
  }
  return std::get<Execution>(execution_).advance();
}

std::vector<int> Communicator::awaited() const {
  if (auto* direct = std::get_if<DirectExecution>(&execution_)) return direct->awaited();
  return std::get<Execution>(execution_).awaited();
}

bool Communicator::begin(const PreparedCall& prepared, int spins) {
  return prepared.begins_directly()
             ? begin(prepared, prepared.direct.input, prepared.direct.output, spins)
             : begin(prepared, prepared.buffers.input, prepared.buffers.output, spins);
}

bool Communicator::begin(const PreparedCall& prepared, const void* input, void* output, int spins) {
  enter(endpoint(), prepared.record);
  try {
    if (prepared.plan) {
      plan_ = prepared.plan;
      buffers_ = prepared.buffers;
      buffers_.input = static_cast<const std::byte*>(input);
      buffers_.output = static_cast<std::byte*>(output);
    }
    if (prepared.begins_directly()) {
      DirectCall call = prepared.direct;
      call.input = static_cast<const std::byte*>(input);
      call.output = static_cast<std::byte*>(output);
      execution_.emplace<DirectExecution>(endpoint(), call);
    } else {
      execution_.emplace<Execution>(*plan_, buffers_, endpoint());
    }
    return poll(spins);
  } catch (...) {
    abandon(endpoint(), prepared.record);
    throw;
  }
}

// Returns true if the call that has begun is over.
bool Communicator::poll(int spins) {
  for (int spin = 0; spin < spins; ++spin) {
    const Progress progress = advance();
    if (progress == Progress::done) {
      endpoint().leave();
      return true;
    }
    if (progress == Progress::blocked) pause();
  }
  return false;
}

void Communicator::finish(const PreparedCall& prepared, const Waiting& waiting) {
  Endpoint& end = endpoint();
  try {
    LongWait wait(warning_, *group_, rank_, waiting);
    const bool is_done = wait_for(
        end, [this] { return advance(); }, waiting.deadline, [this] { return awaited(); },
        [&](const std::vector<int>& awaited, bool moved) { wait.check(awaited, moved); });
    if (!is_done) end.time_out();
  } catch (...) {
    abandon(end, prepared.record);
    throw;
  }
  end.leave();
}

void Communicator::run(const PreparedCall& prepared, const Waiting& waiting) {
  if (!begin(prepared, 1)) finish(prepared, waiting);
}

// Asynchronous calls ---------------------------------------------------------------------------

// A call that several threads may continue, one after another.
class Communicator::AsyncCall final : public TaskQueue::Entry {
 public:
  AsyncCall(Communicator& communicator, PreparedCall prepared, Clock::duration limit,
            bool has_begun, std::shared_ptr<void> kept)
      : Entry(std::move(kept)),
        communicator_(communicator),
        group_(communicator.group_),
        rank_(communicator.rank_),
        prepared_(std::move(prepared)),
        limit_(limit) {
    if (has_begun) start_clock();
  }

  bool run(Clock::time_point deadline, const Interrupt& interrupt,
           const std::function<bool()>& stops) override {
    Endpoint& end = communicator_.endpoint();
    const Endpoint::ReportLater report_later(end);
    bool has_entered = long_wait_.has_value(), is_interrupted = false, is_over = false;
    auto attempt = [&] {
      const Progress progress = communicator_.advance();
      is_over = progress == Progress::done;
      return progress == Progress::blocked && stops && stops() ? Progress::done : progress;
    };
    auto check = [&](const std::vector<int>& awaited, bool moved) {
      try {
        if (interrupt) interrupt();
      } catch (...) {
        is_interrupted = true;
        throw;
      }
      long_wait_->check(awaited, moved);
    };
    try {
      if (!has_entered) {
        begin();
        start_clock();
        if (communicator_.begin(prepared_, 1)) {
          finish(nullptr);
          return true;
        }
        has_entered = true;
      }
      const bool in_time = wait_for(
          end, attempt, std::min(deadline, waiting_.deadline),
          [this] { return communicator_.awaited(); }, check);
      if (!in_time && Clock::now() >= waiting_.deadline) end.time_out();
    } catch (...) {
      if (is_interrupted) throw;
      if (has_entered) abandon(end, prepared_.record);
      finish(std::current_exception());
      return true;
    }
    if (!is_over) return false;
    end.leave();
    finish(nullptr);
    return true;
  }

 private:
  void mark_reported() override { group_->endpoint(rank_).mark_reported(); }

  void start_clock() {
    waiting_.began = Clock::now();
    waiting_.deadline = waiting_.began + limit_;
    long_wait_.emplace(communicator_.warning_, *communicator_.group_, communicator_.rank_,
                       waiting_);
  }

  Communicator& communicator_;  // valid until the call is done
  const std::shared_ptr<Group> group_;
  const int rank_;
  const PreparedCall prepared_;
  const Clock::duration limit_;
  Waiting waiting_;
  std::optional<LongWait> long_wait_;
};

namespace {

// A function of the program. It may wait for other ranks.
class AsyncFunction final : public TaskQueue::Entry {
 public:
  AsyncFunction(std::function<void()> function, std::shared_ptr<Group> group, int rank,
                std::shared_ptr<void> kept)
      : Entry(std::move(kept)),
        function_(std::move(function)),
        group_(std::move(group)),
        rank_(rank) {}

  bool needs_thread() const override { return true; }

  bool run(Clock::time_point, const Interrupt&, const std::function<bool()>&) override {
    const Endpoint::ReportLater report_later(group_->endpoint(rank_));
    std::exception_ptr error;
    begin();
    try {
      function_();
    } catch (const Failure&) {
      error = std::current_exception();
    } catch (...) {
      // The peers wait for this call, so the group must fail.
      error = std::current_exception();
      use_reserve();
      group_->fail({FailureKind::aborted,
                    "rank " + std::to_string(rank_) +
                        " left an asynchronous call because of an error of its own",
                    {rank_}});
    }
    finish(error);
    return true;
  }

 private:
  void mark_reported() override { group_->endpoint(rank_).mark_reported(); }

  const std::function<void()> function_;
  const std::shared_ptr<Group> group_;
  const int rank_;
};

}  // namespace

TaskQueue* Communicator::tasks() {
  // A forked child leaks its copy of the parent's queue. The destructor would wait for a thread
  // that does not exist.
  if (tasks_ && tasks_->is_of_parent()) new std::shared_ptr(std::move(tasks_));
  return tasks_.get();
}

std::shared_ptr<Task> Communicator::submit(PreparedCall prepared, Clock::duration limit,
                                           std::shared_ptr<void> kept) {
  start_tasks();
  tasks_->collect();
  auto call =
      std::make_shared<AsyncCall>(*this, std::move(prepared), limit, false, std::move(kept));
  tasks_->submit(call);
  return call;
}

std::shared_ptr<Task> Communicator::submit_at_once(
    const PreparedCall& prepared, const void* input, void* output, std::size_t bytes,
    Clock::duration limit, const std::function<std::shared_ptr<void>()>& keep) {
  if (has_calls_under_way()) {
    return submit(with_arrays(prepared, input, output), limit, keep());
  }
  const Endpoint::ReportLater report_later(endpoint());
  bool has_begun = false;
  try {
    if (begin(prepared, input, output, held_polls(bytes))) return nullptr;
    has_begun = true;
    tasks_->collect();
    auto call = std::make_shared<AsyncCall>(*this, prepared, limit, has_begun, keep());
    tasks_->submit(call);
    return call;
  } catch (const Failure&) {
    auto call = std::make_shared<AsyncCall>(*this, prepared, limit, has_begun, nullptr);
    call->finish(std::current_exception());
    return call;
  } catch (...) {
    if (has_begun) abandon(endpoint(), prepared.record);  // no memory: the peers wait
    throw;
  }
}

std::shared_ptr<Task> Communicator::submit(std::function<void()> function,
                                           std::shared_ptr<void> kept) {
  start_tasks();
  tasks_->collect();
  auto call = std::make_shared<AsyncFunction>(std::move(function), group_, rank_, std::move(kept));
  tasks_->submit(call);
  return call;
}

void Communicator::wait_for_task_queue(const Interrupt& interrupt) {
  if (tasks() && !tasks_->is_this_thread()) tasks_->drain(interrupt);
}

Messages& Communicator::messages() {
  if (!has_messages()) messages_ = std::make_shared<Messages>(group_, rank_, warning_);
  return *messages_;
}

bool Communicator::has_messages() {
  // Leaked, as in tasks().
  if (messages_ && messages_->is_of_parent()) new std::shared_ptr(std::move(messages_));
  return messages_ != nullptr;
}

void Communicator::warn_after(Warning warning) {
  warning_ = std::move(warning);
  if (has_messages()) messages_->warn_after(warning_);
}

void Communicator::wait_for_all(const Interrupt& interrupt) {
  wait_for_tasks(interrupt);
  if (has_messages()) messages_->drain(interrupt);
}

std::size_t Communicator::outstanding() {
  return (tasks() ? tasks_->outstanding() : 0) + (has_messages() ? messages_->outstanding() : 0);
}

void Communicator::stop() {
  if (tasks()) tasks_->join();
  if (has_messages()) messages_->stop();
}

const Plan& Communicator::plan(const Algorithm& algorithm, int root, std::size_t count) {
  const Algorithm& chosen = count == 0 ? dissemination_barrier() : algorithm;
  std::lock_guard lock(plans_mutex_);
  auto [place, added] = plans_.try_emplace({&chosen, root});
  if (added) {
    place->second = {make_plan(chosen, rank_, size(), root), chosen.weak_from_this().lock()};
  }
  return place->second.plan;
}

Buffers Communicator::buffers_of(const Array& array, const Reduction* reduction) {
  Buffers buffers;
  buffers.input = static_cast<const std::byte*>(array.input);
  buffers.output = static_cast<std::byte*>(array.output);
  buffers.count = array.count;
  buffers.item = array.item;
  buffers.reduction = reduction;
  buffers.size = size();
  buffers.scratch = &scratch_;
  return buffers;
}

// Combines all arrays in one pass, in parts if the arrays are long.
void Communicator::direct_all_reduce_together(const std::vector<Communicator*>& communicators,
                                              const std::vector<Array>& arrays, Reducing reducing,
                                              const Waiting& waiting) {
  std::size_t ranks = communicators.size(), entered = 0;
  PreparedCall prepared = communicators[0]->prepare(direct_all_reduce(), arrays[0], 0, &reducing);
  if (waiting.interrupt) waiting.interrupt();
  try {
    for (; entered < ranks; ++entered) {
      enter(communicators[entered]->endpoint(), prepared.record);
    }
    std::size_t bytes = arrays[0].count * arrays[0].item;
    const std::size_t most = std::max<std::size_t>(bytes / kTogetherPartBytes, 1);
    const int parts = static_cast<int>(std::min(most, static_cast<std::size_t>(threads())));
    in_parallel(parts, [&](int part) {
      std::size_t length = arrays[0].count / static_cast<std::size_t>(parts);
      length = (length + kCacheLine) / kCacheLine * kCacheLine;
      std::size_t first = std::min(static_cast<std::size_t>(part) * length, arrays[0].count);
      std::size_t count = std::min(length, arrays[0].count - first);
      std::vector<const void*> sources;
      std::vector<void*> targets;
      for (const Array& array : arrays) {
        sources.push_back(static_cast<const std::byte*>(array.input) + first * array.item);
        targets.push_back(static_cast<std::byte*>(array.output) + first * array.item);
      }
      combine_all(prepared.direct, targets.data(), ranks, sources.data(), static_cast<int>(ranks),
                  count);
    });
  } catch (...) {
    for (std::size_t r = 0; r < entered; ++r) {
      abandon(communicators[r]->endpoint(), prepared.record);
    }
    throw;
  }
  for (Communicator* communicator : communicators) communicator->endpoint().leave();
}

void Communicator::all_reduce_together(const std::vector<Communicator*>& communicators,
                                       const std::vector<Array>& arrays, Reducing reducing,
                                       const Algorithm& algorithm, const Waiting& waiting) {
  if (&algorithm == &direct_all_reduce() && arrays.at(0).count > 0 &&
      communicators.at(0)->has_board()) {
    direct_all_reduce_together(communicators, arrays, reducing, waiting);
    return;
  }
  const CallRecord call = communicators.at(0)->record(algorithm, arrays.at(0), 0, &reducing).record;
  std::vector<const Plan*> plans;
  std::vector<Buffers> buffers;
  std::vector<Endpoint*> endpoints;
  for (std::size_t r = 0; r < communicators.size(); ++r) {
    Communicator& communicator = *communicators[r];
    plans.push_back(&communicator.plan(algorithm, 0, arrays[r].count));
    buffers.push_back(communicator.buffers_of(arrays[r], &reduction(reducing.dtype, reducing.op)));
    endpoints.push_back(&communicator.group_->endpoint(communicator.rank_));
  }
  run_together(plans, buffers, call, endpoints, waiting.deadline, waiting.interrupt);
}

}  // namespace pycollective
