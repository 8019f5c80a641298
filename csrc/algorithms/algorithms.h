// The algorithms by name. To add one, write a file in this directory and add a line to registry.cc.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "schedule/step.h"

namespace pycollective {

const Algorithm& ring_all_reduce();
const Algorithm& hierarchical_copy_all_reduce();
const Algorithm& reduce_to_one_all_reduce();
const Algorithm& halving_doubling_all_reduce();
const Algorithm& recursive_doubling_all_reduce();
const Algorithm& double_tree_all_reduce();
const Algorithm& direct_all_reduce();
const Algorithm& direct_broadcast();
const Algorithm& tree_broadcast();
const Algorithm& chain_broadcast();
const Algorithm& direct_reduce();
const Algorithm& tree_reduce();
const Algorithm& ring_all_gather();
const Algorithm& doubling_all_gather();
const Algorithm& direct_all_gather();
const Algorithm& ring_reduce_scatter();
const Algorithm& halving_reduce_scatter();
const Algorithm& direct_reduce_scatter();
const Algorithm& direct_gather();
const Algorithm& direct_scatter();
const Algorithm& direct_all_to_all();
const Algorithm& dissemination_barrier();
const Algorithm& chain_scan();
const Algorithm& chain_exscan();

// Returns all algorithms; the default of each collective comes before its other algorithms.
std::span<const Algorithm* const> all_algorithms();

const Algorithm& default_algorithm(Collective collective);
// Returns the algorithm that the direct path (executor/direct.h) executes without messages, or the
// default for a collective without such an algorithm.
const Algorithm& direct_algorithm(Collective collective);

// Returns the algorithm that algorithm="auto" selects in a group with this Group::transport().
// `bytes` is nccl-tests' count: the size of the whole array.
const Algorithm& select(Collective collective, std::size_t bytes, int ranks,
                        std::string_view transport);

// A row of a table measured on this machine. It takes precedence over the built-in rows.
struct Choice {
  Collective collective;
  std::size_t most_bytes;
  const Algorithm* algorithm;
};

// Returns nullptr for an unknown name.
const Algorithm* find_algorithm(Collective collective, std::string_view name);

}  // namespace pycollective
