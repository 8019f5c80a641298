// An algorithm defined by a function that yields one rank's steps, like Python's @algorithm.
#pragma once

#include <string_view>

#include "schedule/step.h"

namespace pycollective {

class FunctionAlgorithm final : public Algorithm {
 public:
  using Function = Steps (*)(int rank, int size);
  using Count = int (*)(int size);

  FunctionAlgorithm(std::string_view name, Collective collective, Function steps, Count chunks,
                    Count scratch)
      : name_(name), collective_(collective), steps_(steps), chunks_(chunks), scratch_(scratch) {}

  std::string_view name() const override { return name_; }
  Collective collective() const override { return collective_; }
  int num_chunks(int size) const override { return chunks_(size); }
  int num_scratch(int size) const override { return scratch_(size); }
  Steps steps(int rank, int size) const override { return steps_(rank, size); }

 private:
  std::string_view name_;
  Collective collective_;
  Function steps_;
  Count chunks_, scratch_;
};

inline int one_chunk(int) { return 1; }
inline int chunk_for_each_rank(int size) { return size; }
inline int no_scratch(int) { return 0; }

// Returns the only algorithm object of a function. It is never destroyed: see support/lasting.h.
template <FunctionAlgorithm::Function steps>
const Algorithm& algorithm(std::string_view name, Collective collective,
                           FunctionAlgorithm::Count chunks,
                           FunctionAlgorithm::Count scratch = no_scratch) {
  static const Algorithm& instance =
      *new FunctionAlgorithm(name, collective, steps, chunks, scratch);
  return instance;
}

}  // namespace pycollective
