// An algorithm given as a table of steps for one number of ranks. Users write such algorithms in
// Python.
#pragma once

#include <string>

#include "schedule/verify.h"

namespace pycollective {

class TabulatedAlgorithm final : public Algorithm {
 public:
  // Marks the steps that complete a chunk, and proves the schedule: out of place, in place, and for
  // arrays of any length. Throws std::invalid_argument with the first error.
  TabulatedAlgorithm(std::string name, Schedule schedule, const Watch& watch = {});

  const Schedule& schedule() const { return schedule_; }
  int size() const { return static_cast<int>(schedule_.steps.size()); }

  std::string_view name() const override { return name_; }
  Collective collective() const override { return schedule_.collective; }
  int num_chunks(int) const override { return schedule_.chunks; }
  int num_scratch(int) const override { return schedule_.scratch; }
  Steps steps(int rank, int) const override { return steps_of(schedule_, rank); }
  std::uint64_t fingerprint() const override { return fingerprint_; }

 private:
  std::string name_;
  Schedule schedule_;
  std::uint64_t fingerprint_ = 0;
};

}  // namespace pycollective
