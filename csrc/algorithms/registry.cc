#include "algorithms/algorithms.h"

namespace pycollective {

const std::vector<const Algorithm*>& all_algorithms() {
  static const std::vector<const Algorithm*> all = {
      &ring_all_reduce(),          &hierarchical_copy_all_reduce(),
      &reduce_to_one_all_reduce(), &halving_doubling_all_reduce(),
      &double_tree_all_reduce(),   &direct_all_reduce(),
      &tree_broadcast(),           &dissemination_barrier(),
  };
  return all;
}

const Algorithm* find_algorithm(Collective collective, std::string_view name) {
  for (const Algorithm* algorithm : all_algorithms()) {
    if (algorithm->collective() == collective && algorithm->name() == name) return algorithm;
  }
  return nullptr;
}

}  // namespace pycollective
