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
      &recursive_doubling_all_reduce(),
      &double_tree_all_reduce(),
      &direct_all_reduce(),
      // other collectives
      &tree_reduce(),
      &direct_reduce(),
      &ring_reduce_scatter(),
      &halving_reduce_scatter(),
      &direct_reduce_scatter(),
      &tree_broadcast(),
      &chain_broadcast(),
      &direct_broadcast(),
      &direct_scatter(),
      &direct_gather(),
      &ring_all_gather(),
      &doubling_all_gather(),
      &direct_all_gather(),
      &direct_all_to_all(),
      &dissemination_barrier(),
      &chain_scan(),
      &chain_exscan(),
  };
  return all;
}

const Algorithm& default_algorithm(Collective collective) {
  for (const Algorithm* algorithm : all_algorithms()) {
    if (algorithm->collective() == collective) return *algorithm;
  }
  throw std::logic_error("a collective without algorithms");
}

const Algorithm& direct_algorithm(Collective collective) {
  switch (collective) {
    case Collective::all_reduce:
      return direct_all_reduce();
    case Collective::reduce:
      return direct_reduce();
    case Collective::reduce_scatter:
      return direct_reduce_scatter();
    case Collective::broadcast:
      return direct_broadcast();
    case Collective::scatter:
      return direct_scatter();
    case Collective::gather:
      return direct_gather();
    case Collective::all_gather:
      return direct_all_gather();
    case Collective::all_to_all:
      return direct_all_to_all();
    case Collective::barrier:
      return dissemination_barrier();
    case Collective::scan:
    case Collective::exscan:
      return default_algorithm(collective);
  }
  throw std::logic_error("a collective without a direct algorithm");
}

const Algorithm* find_algorithm(Collective collective, std::string_view name) {
  for (const Algorithm* algorithm : all_algorithms()) {
    if (algorithm->collective() == collective && algorithm->name() == name) return algorithm;
  }
  return nullptr;
}

}  // namespace pycollective
