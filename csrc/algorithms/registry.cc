#include <array>
#include <stdexcept>

#include "algorithms/algorithms.h"

namespace pycollective {

std::span<const Algorithm* const> all_algorithms() {
  static const std::array all = {
      // all_reduce
      &ring_all_reduce(),
      &hierarchical_copy_all_reduce(),
      &reduce_to_one_all_reduce(),
      &halving_doubling_all_reduce(),
      &double_tree_all_reduce(),
      &direct_all_reduce(),
      // the others
      &tree_reduce(),
      &ring_reduce_scatter(),
      &halving_reduce_scatter(),
      &direct_reduce_scatter(),
      &tree_broadcast(),
      &chain_broadcast(),
      &direct_scatter(),
      &direct_gather(),
      &ring_all_gather(),
      &doubling_all_gather(),
      &direct_all_gather(),
      &direct_all_to_all(),
      &dissemination_barrier(),
  };
  return all;
}

const Algorithm& default_algorithm(Collective collective) {
  for (const Algorithm* algorithm : all_algorithms()) {
    if (algorithm->collective() == collective) return *algorithm;
  }
  throw std::logic_error("a collective without algorithms");
}

const Algorithm* find_algorithm(Collective collective, std::string_view name) {
  for (const Algorithm* algorithm : all_algorithms()) {
    if (algorithm->collective() == collective && algorithm->name() == name) return algorithm;
  }
  return nullptr;
}

}  // namespace pycollective
