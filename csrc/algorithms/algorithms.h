// The algorithms by name. One file each; a new one is a file beside them and a line in registry.cc.
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

// All algorithms, the default of each collective first.
std::span<const Algorithm* const> all_algorithms();

const Algorithm& default_algorithm(Collective collective);
// The algorithm that the direct path (executor/direct.h) carries out without messages; of the
// collectives that have none, the default.
const Algorithm& direct_algorithm(Collective collective);

// What algorithm="auto" means: of a collective of so many bytes (nccl-tests' count: of the whole
// array), in a group whose Group::transport() is this.
const Algorithm& select(Collective collective, std::size_t bytes, int ranks,
                        std::string_view transport);

// A row that is asked before those: one of a table measured on this machine.
struct Choice {
  Collective collective;
  std::size_t most_bytes;
  const Algorithm* algorithm;
};

// nullptr when there is none of that name.
const Algorithm* find_algorithm(Collective collective, std::string_view name);

}  // namespace pycollective
