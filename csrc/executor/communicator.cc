#include "executor/communicator.h"

#include <algorithm>
#include <cstring>

#include "algorithms/algorithms.h"

namespace pycollective {
namespace {

CallRecord record_of(const Algorithm& algorithm, const Array& array, int root) {
  CallRecord call;
  call.collective = to_string(algorithm.collective()).data();
  std::strncpy(call.algorithm, algorithm.name().data(), sizeof call.algorithm - 1);
  std::strncpy(call.dtype, array.type.c_str(), sizeof call.dtype - 1);
  call.root = has_root(algorithm.collective()) ? root : -1;
  call.detail = algorithm.fingerprint();
  call.dims = static_cast<int>(array.shape.size());
  for (int i = 0; i < std::min(call.dims, CallRecord::kMaxDims); ++i) {
    call.shape[i] = array.shape[static_cast<std::size_t>(i)];
  }
  return call;
}

// Parts one after the other.
std::vector<Part> in_a_row(const std::vector<std::size_t>& counts) {
  std::vector<Part> parts;
  std::size_t first = 0;
  for (std::size_t count : counts) {
    parts.push_back({first, count});
    first += count;
  }
  return parts;
}

}  // namespace

Communicator::Communicator(std::shared_ptr<Group> group, int rank)
    : group_(std::move(group)), rank_(rank) {}

ProgressThread* Communicator::progress() {
  // What is the parent's cannot even be destroyed here: its thread seems to use it.
  if (progress_ && progress_->is_of_parent()) static_cast<void>(progress_.release());
  return progress_.get();
}

std::shared_ptr<Task> Communicator::submit(std::function<void()> call, std::shared_ptr<void> kept) {
  if (!progress()) progress_ = std::make_unique<ProgressThread>();
  progress_->collect();
  return progress_->submit(std::move(call), std::move(kept));
}

void Communicator::settle_progress(const Interrupt& interrupt) {
  if (progress() && !progress_->is_this_thread()) progress_->drain(interrupt);
}

Messages& Communicator::messages() {
  if (!has_messages()) messages_ = std::make_unique<Messages>(group_, rank_);
  return *messages_;
}

bool Communicator::has_messages() {
  if (messages_ && messages_->is_of_parent()) static_cast<void>(messages_.release());
  return messages_ != nullptr;
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

void Communicator::run(const Algorithm& algorithm, int root, const Buffers& buffers,
                       const CallRecord& call, const Waiting& waiting) {
  run_blocking(plan(algorithm, root, buffers.pairwise ? 1 : buffers.count), buffers, call,
               group_->endpoint(rank_), waiting.deadline, waiting.interrupt);
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
  CallRecord call = record_of(algorithm, array, root);
  call.op = to_string(reducing.op).data();
  run_equal(algorithm, root, buffers_of(array, &reduction(reducing.dtype, reducing.op)), call,
            waiting);
}

void Communicator::move(const Algorithm& algorithm, const Array& array, int root,
                        const Waiting& waiting) {
  run_equal(algorithm, root, buffers_of(array, nullptr), record_of(algorithm, array, root),
            waiting);
}

void Communicator::barrier(const Waiting& waiting) {
  run(dissemination_barrier(), 0, Buffers{}, record_of(dissemination_barrier(), {}, 0), waiting);
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

void Communicator::all_reduce_together(const std::vector<Communicator*>& communicators,
                                       const std::vector<Array>& arrays, Reducing reducing,
                                       const Algorithm& algorithm, const Waiting& waiting) {
  CallRecord call = record_of(algorithm, arrays.at(0), 0);
  call.op = to_string(reducing.op).data();
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
