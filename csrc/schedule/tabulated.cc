#include "schedule/tabulated.h"

#include <functional>
#include <stdexcept>

namespace pycollective {

TabulatedAlgorithm::TabulatedAlgorithm(std::string name, Schedule schedule, const Watch& watch)
    : name_(std::move(name)), schedule_(std::move(schedule)) {
  mark_complete(schedule_);
  std::string problem = prove(schedule_, watch);
  if (!problem.empty()) throw std::invalid_argument(name_ + ": " + problem);
  std::string text = std::to_string(schedule_.chunks);
  for (const auto& steps : schedule_.steps) {
    for (const Step& step : steps) text += to_string(step) + ";";
    text += "|";
  }
  fingerprint_ = std::hash<std::string>()(text);
}

}  // namespace pycollective
