#include "executor/communicator.h"

#include <algorithm>
#include <new>
#include <system_error>
#include <thread>

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
  call.dims = static_cast<int>(array.shape.size());
  for (int i = 0; i < std::min(call.dims, CallRecord::kMaxDims); ++i) {
    call.shape[i] = array.shape[static_cast<std::size_t>(i)];
  }
  for (int i = CallRecord::kMaxDims; i < call.dims; ++i) {  // for which the record has no room
    call.detail = call.detail * kOddFactor +
                  static_cast<std::uint64_t>(array.shape[static_cast<std::size_t>(i)]);
  }
  call.seal();
  return call;
}

std::vector<Part> in_a_row(const std::vector<std::size_t>& counts) {
  std::vector<Part> parts;
  std::size_t first = 0;
  for (std::size_t count : counts) {
    parts.push_back({first, count});
    first += count;
  }
  return parts;
}

Communicator::Communicator(std::shared_ptr<Group> group, int rank)
    : group_(std::move(group)), rank_(rank) {
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

bool Communicator::goes_directly(const Algorithm& algorithm) {
  return &algorithm == &direct_algorithm(algorithm.collective()) && has_board();
}

PreparedCall Communicator::prepare(const Algorithm& algorithm, const Array& array, int root,
                                   const Reducing* reducing) {
  PreparedCall prepared;
  prepared.call = record_of(algorithm, array, root);
  prepared.data.collective = algorithm.collective();
  prepared.data.root = root;
  prepared.data.count = array.count;
  prepared.data.item = array.item;
  if (reducing) {
    set_name(prepared.call.op, to_string(reducing->op));
    prepared.call.detail += reducing->reproducible;
    prepared.call.seal();
    prepared.data.dtype = reducing->dtype;
    prepared.data.op = reducing->op;
    prepared.data.reduction = &reduction(reducing->dtype, reducing->op);
    prepared.data.fused = !reducing->reproducible;
  }
  return prepared;
}

void Communicator::run_directly(const PreparedCall& prepared, const Array& array,
                                const Waiting& waiting) {
  if (!begin(prepared, array.input, array.output, 1)) finish(prepared, waiting);
}

bool Communicator::begin(const PreparedCall& prepared, const void* input, void* output, int spins) {
  Endpoint& end = endpoint();
  enter(end, prepared.call);
  try {
    DirectCall call = prepared.data;
    call.input = static_cast<const std::byte*>(input);
    call.output = static_cast<std::byte*>(output);
    begun_.emplace(end, call);
    for (int spin = 0; spin < spins; ++spin) {
      Progress progress = begun_->advance();
      if (progress == Progress::done) {
        end.leave();
        return true;
      }
      if (progress == Progress::blocked) pause();
    }
  } catch (...) {
    abandon(end, prepared.call);
    throw;
  }
  return false;
}

void Communicator::finish(const PreparedCall& prepared, const Waiting& waiting) {
  Endpoint& end = endpoint();
  try {
    LongWait wait(warning_, *group_, rank_, waiting);
    wait_for(
        end, [&] { return begun_->advance(); }, waiting.deadline, [&] { return begun_->awaited(); },
        [&](const std::vector<int>& awaited, bool moved) { wait.look(awaited, moved); });
  } catch (...) {
    abandon(end, prepared.call);
    throw;
  }
  end.leave();
}

ProgressThread* Communicator::progress() {
  // What is the parent's cannot even be destroyed here: its thread seems to use it.
  if (progress_ && progress_->is_of_parent()) static_cast<void>(progress_.release());
  return progress_.get();
}

std::shared_ptr<Task> Communicator::submit(std::function<void()> call, std::shared_ptr<void> kept) {
  start_progress();
  progress_->collect();
  // The caller goes on to other calls. If this one is not made, the others must hear of it.
  auto told = [this, call = std::move(call)] {
    try {
      call();
    } catch (const Failure&) {
      throw;
    } catch (...) {
      use_reserve();
      group_->fail(FailureKind::aborted,
                   "rank " + std::to_string(rank_) +
                       " left an asynchronous call because of an error of its own");
      throw;
    }
  };
  return progress_->submit(std::move(told), std::move(kept));
}

void Communicator::settle_progress(const Interrupt& interrupt) {
  if (progress() && !progress_->is_this_thread()) progress_->drain(interrupt);
}

Messages& Communicator::messages() {
  if (!has_messages()) messages_ = std::make_shared<Messages>(group_, rank_, warning_);
  return *messages_;
}

bool Communicator::has_messages() {
  // As of progress(): the parent's is never destroyed here.
  if (messages_ && messages_->is_of_parent()) new std::shared_ptr(std::move(messages_));
  return messages_ != nullptr;
}

void Communicator::warn_after(Warning warning) {
  warning_ = std::move(warning);
  if (has_messages()) messages_->warn_after(warning_);
}

void Communicator::settle_all(const Interrupt& interrupt) {
  settle(interrupt);
  if (has_messages()) messages_->drain(interrupt);
}

std::size_t Communicator::outstanding() {
  return (progress() ? progress_->outstanding() : 0) +
         (has_messages() ? messages_->outstanding() : 0);
}

void Communicator::stop() {
  if (progress()) progress_->join();
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

void Communicator::run(const Algorithm& algorithm, int root, Buffers buffers,
                       const CallRecord& call, const Waiting& waiting) {
  if (buffers.item == 0) {  // however many items there are, there is nothing to move
    buffers.item = 1;
    buffers.count = 0;
    buffers.pairwise = false;
  }
  LongWait wait(warning_, *group_, rank_, waiting);
  run_blocking(plan(algorithm, root, buffers.pairwise ? 1 : buffers.count), buffers, call,
               endpoint(), waiting.deadline,
               [&](const std::vector<int>& awaited, bool moved) { wait.look(awaited, moved); });
}

void Communicator::run_equal(const Algorithm& algorithm, int root, Buffers buffers,
                             const CallRecord& call, const Waiting& waiting) {
  if (!in_parts(algorithm.collective())) return run(algorithm, root, buffers, call, waiting);
  std::vector<std::size_t> counts(static_cast<std::size_t>(size()), buffers.count);
  run_parts(algorithm, root, buffers, in_a_row(counts), {0, buffers.count}, call, waiting);
}

void Communicator::run_parts(const Algorithm& algorithm, int root, Buffers buffers,
                             const std::vector<Part>& parts, Part single, const CallRecord& call,
                             const Waiting& waiting) {
  // Chunk i is the part of the rank that plays rank i of the schedule.
  std::vector<Part> played(parts);
  std::rotate(played.begin(), played.begin() + root, played.end());
  int me = (rank_ - root + size()) % size();
  auto of = [&](int count) { return count == 1 ? &single : played.data(); };
  buffers.input_parts = of(input_chunks(algorithm.collective(), size(), me, size()));
  buffers.output_parts = of(output_chunks(algorithm.collective(), size(), me, size()));
  run(algorithm, root, buffers, call, waiting);
}

void Communicator::reduce(const Algorithm& algorithm, const Array& array, Reducing reducing,
                          int root, const Waiting& waiting) {
  if (goes_directly(algorithm)) {
    return run_directly(prepare(algorithm, array, root, &reducing), array, waiting);
  }
  CallRecord call = record_of(algorithm, array, root);
  set_name(call.op, to_string(reducing.op));
  call.detail += reducing.reproducible;
  call.seal();
  run_equal(algorithm, root, buffers_of(array, &reduction(reducing.dtype, reducing.op)), call,
            waiting);
}

void Communicator::move(const Algorithm& algorithm, const Array& array, int root,
                        const Waiting& waiting) {
  if (goes_directly(algorithm)) {
    return run_directly(prepare(algorithm, array, root, nullptr), array, waiting);
  }
  run_equal(algorithm, root, buffers_of(array, nullptr), record_of(algorithm, array, root),
            waiting);
}

void Communicator::barrier(const Waiting& waiting) {
  move(dissemination_barrier(), {}, 0, waiting);
}

void Communicator::move(const Algorithm& algorithm, const Array& array,
                        const std::vector<std::size_t>& counts, int root, const Waiting& waiting) {
  Buffers buffers = buffers_of(array, nullptr);
  buffers.count = *std::max_element(counts.begin(), counts.end());
  run_parts(algorithm, root, buffers, in_a_row(counts),
            {0, counts[static_cast<std::size_t>(rank_)]}, record_of(algorithm, array, root),
            waiting);
}

void Communicator::all_to_all(const Array& array, const std::vector<std::size_t>& input_counts,
                              const std::vector<std::size_t>& output_counts,
                              const Waiting& waiting) {
  Buffers buffers = buffers_of(array, nullptr);
  std::vector<Part> sent = in_a_row(input_counts), received = in_a_row(output_counts);
  buffers.input_parts = sent.data();
  buffers.output_parts = received.data();
  buffers.count = std::max(*std::max_element(input_counts.begin(), input_counts.end()),
                           *std::max_element(output_counts.begin(), output_counts.end()));
  buffers.pairwise = true;
  run(direct_all_to_all(), 0, buffers, record_of(direct_all_to_all(), array, 0), waiting);
}

// All of it is in this thread's hands: one pass over all arrays, cut among threads if it is long.
void Communicator::directly_together(const std::vector<Communicator*>& communicators,
                                     const std::vector<Array>& arrays, Reducing reducing,
                                     const Waiting& waiting) {
  std::size_t ranks = communicators.size(), entered = 0;
  PreparedCall prepared = communicators[0]->prepare(direct_all_reduce(), arrays[0], 0, &reducing);
  if (waiting.interrupt) waiting.interrupt();
  try {
    for (; entered < ranks; ++entered) {
      enter(communicators[entered]->endpoint(), prepared.call);
    }
    std::size_t bytes = arrays[0].count * arrays[0].item;
    std::size_t parts = bytes < kTogetherThreadsFrom ? 1 : ranks;
    auto combine = [&](std::size_t part) {
      std::size_t length = (arrays[0].count / parts + kCacheLine) / kCacheLine * kCacheLine;
      std::size_t first = std::min(part * length, arrays[0].count);
      std::size_t count = std::min(length, arrays[0].count - first);
      std::vector<const void*> sources;
      std::vector<void*> targets;
      for (const Array& array : arrays) {
        sources.push_back(static_cast<const std::byte*>(array.input) + first * array.item);
        targets.push_back(static_cast<std::byte*>(array.output) + first * array.item);
      }
      combine_all(prepared.data, targets.data(), ranks, sources.data(), static_cast<int>(ranks),
                  count);
    };
    std::vector<std::jthread> threads;
    for (std::size_t part = 1; part < parts; ++part) {
      try {
        threads.emplace_back(combine, part);
      } catch (const std::system_error&) {  // the system starts no further thread
        combine(part);
      }
    }
    combine(0);
  } catch (...) {
    for (std::size_t r = 0; r < entered; ++r) {
      abandon(communicators[r]->endpoint(), prepared.call);
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
    directly_together(communicators, arrays, reducing, waiting);
    return;
  }
  CallRecord call = record_of(algorithm, arrays.at(0), 0);
  set_name(call.op, to_string(reducing.op));
  call.seal();
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
