// The shapes and lengths of a rank's input and output in a collective call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "schedule/collective.h"

namespace pycollective {

struct CallShape {
  std::vector<std::int64_t> agreed;  // the shape that must be equal on all ranks
  std::vector<std::int64_t> result;
  std::size_t count = 0;                // as Array::count
  std::size_t inputs = 0, outputs = 0;  // items of this rank's input and output
};

// `shape` is the input's; on a scatter's ranks other than the root, the output's. Returns nothing
// if there are no items. A collective of parts also needs a first axis that can be cut
// into one equal part for each rank.
std::optional<CallShape> call_shape(Collective collective, const std::vector<std::int64_t>& shape,
                                    int rank, int size, int root);

}  // namespace pycollective
