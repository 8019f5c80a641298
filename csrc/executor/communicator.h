// One rank's collectives: checks nothing that Python has checked, chooses the plan, and runs it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "executor/executor.h"
#include "transport/group.h"

namespace pycollective {

// What all ranks must agree on, and the array's place in memory on this one.
struct Array {
  const void* input = nullptr;
  void* output = nullptr;
  std::vector<std::int64_t> shape;
  std::size_t count = 0;
  std::size_t item = 1;
};

// How to wait.
struct Waiting {
  Clock::time_point deadline;
  Interrupt interrupt;
};

class Communicator {
 public:
  Communicator(std::shared_ptr<Group> group, int rank);

  int rank() const { return rank_; }
  int size() const { return group_->size(); }
  Group& group() { return *group_; }

  void all_reduce(const Array& array, DType dtype, Op op, const Algorithm& algorithm,
                  const Waiting& waiting);
  // `type` is the element type's name, for messages: any type can be broadcast.
  void broadcast(const Array& array, const char* type, int root, const Waiting& waiting);
  void barrier(const Waiting& waiting);

  // all_reduce of every rank of a group, by one thread; rank r's array is arrays[r].
  static void all_reduce_together(const std::vector<Communicator*>& communicators,
                                  const std::vector<Array>& arrays, DType dtype, Op op,
                                  const Algorithm& algorithm, const Waiting& waiting);

 private:
  // Ranks without data still meet, so that calls which do not belong together are found out.
  const Plan& plan(const Algorithm& algorithm, int root, std::size_t count);

  std::shared_ptr<Group> group_;
  int rank_;
  std::mutex plans_mutex_;
  std::map<std::pair<const Algorithm*, int>, Plan> plans_;
};

}  // namespace pycollective
