#include "schedule/step.h"

namespace pycollective {

Plan make_plan(const Algorithm& algorithm, int rank, int size, int root) {
  int relative = (rank - root + size) % size;
  Plan plan;
  plan.chunks = algorithm.num_chunks(size);
  plan.scratch = algorithm.num_scratch(size);
  for (Step step : algorithm.steps(relative, size)) {
    if (step.peer >= 0) step.peer = (step.peer + root) % size;
    if (in_parts(algorithm.collective()) && step.verb == Verb::send && step.source.count > 1) {
      plan.packed += step.source.count;
    }
    plan.steps.push_back(step);
  }
  return plan;
}

std::string to_string(const Span& span) {
  if (span.count == 0) return "nothing";
  constexpr const char* names[] = {"input[", "output[", "scratch["};
  std::string text = names[static_cast<int>(span.buffer)] + std::to_string(span.first);
  if (span.count != 1) text += ":" + std::to_string(span.first + span.count);
  return text + "]";
}

std::string to_string(const Step& step) {
  std::string peer = std::to_string(step.peer);
  switch (step.verb) {
    case Verb::send:
      return "send " + to_string(step.source) + " to " + peer;
    case Verb::recv:
      return "recv " + to_string(step.target) + " from " + peer;
    case Verb::recv_reduce:
      return "recv_reduce " + to_string(step.target) + " = " + to_string(step.source) + " + from " +
             peer + (step.completes ? ", complete" : "");
    case Verb::copy:
      return "copy " + to_string(step.source) + " to " + to_string(step.target);
    case Verb::reduce:
      return "reduce " + to_string(step.target) + " += " + to_string(step.source) +
             (step.completes ? ", complete" : "");
  }
  return "unknown step";
}

}  // namespace pycollective
