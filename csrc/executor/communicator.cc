#include "executor/communicator.h"

#include <algorithm>
#include <cstring>

#include "algorithms/algorithms.h"

namespace pycollective {
namespace {

CallRecord record_of(const Algorithm& algorithm, const Array& array, const char* type) {
  CallRecord call;
  call.collective = to_string(algorithm.collective()).data();
  call.algorithm = algorithm.name().data();
  std::strncpy(call.dtype, type, sizeof call.dtype - 1);
  call.dims = static_cast<int>(array.shape.size());
  for (int i = 0; i < std::min(call.dims, CallRecord::kMaxDims); ++i) {
    call.shape[i] = array.shape[static_cast<std::size_t>(i)];
  }
  return call;
}

Buffers buffers_of(const Array& array, const Reduction* reduction, int size) {
  return {static_cast<const std::byte*>(array.input),
          static_cast<std::byte*>(array.output),
          array.count,
          array.item,
          reduction,
          size};
}

}  // namespace

Communicator::Communicator(std::shared_ptr<Group> group, int rank)
    : group_(std::move(group)), rank_(rank) {}

const Plan& Communicator::plan(const Algorithm& algorithm, int root, std::size_t count) {
  const Algorithm& chosen = count == 0 ? dissemination_barrier() : algorithm;
  std::lock_guard lock(plans_mutex_);
  auto [place, added] = plans_.try_emplace({&chosen, root});
  if (added) place->second = make_plan(chosen, rank_, size(), root);
  return place->second;
}

void Communicator::all_reduce(const Array& array, DType dtype, Op op, const Algorithm& algorithm,
                              const Waiting& waiting) {
  CallRecord call = record_of(algorithm, array, to_string(dtype).data());
  call.op = to_string(op).data();
  run_blocking(plan(algorithm, 0, array.count), buffers_of(array, &reduction(dtype, op), size()),
               call, group_->endpoint(rank_), waiting.deadline, waiting.interrupt);
}

void Communicator::broadcast(const Array& array, const char* type, int root,
                             const Waiting& waiting) {
  CallRecord call = record_of(tree_broadcast(), array, type);
  call.root = root;
  run_blocking(plan(tree_broadcast(), root, array.count), buffers_of(array, nullptr, size()), call,
               group_->endpoint(rank_), waiting.deadline, waiting.interrupt);
}

void Communicator::barrier(const Waiting& waiting) {
  run_blocking(plan(dissemination_barrier(), 0, 0), Buffers{},
               record_of(dissemination_barrier(), {}, ""), group_->endpoint(rank_),
               waiting.deadline, waiting.interrupt);
}

void Communicator::all_reduce_together(const std::vector<Communicator*>& communicators,
                                       const std::vector<Array>& arrays, DType dtype, Op op,
                                       const Algorithm& algorithm, const Waiting& waiting) {
  CallRecord call = record_of(algorithm, arrays.at(0), to_string(dtype).data());
  call.op = to_string(op).data();
  std::vector<const Plan*> plans;
  std::vector<Buffers> buffers;
  std::vector<Endpoint*> endpoints;
  for (std::size_t r = 0; r < communicators.size(); ++r) {
    Communicator& communicator = *communicators[r];
    plans.push_back(&communicator.plan(algorithm, 0, arrays[r].count));
    buffers.push_back(buffers_of(arrays[r], &reduction(dtype, op), communicator.size()));
    endpoints.push_back(&communicator.group_->endpoint(communicator.rank_));
  }
  run_together(plans, buffers, call, endpoints, waiting.deadline, waiting.interrupt);
}

}  // namespace pycollective
