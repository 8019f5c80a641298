// What a rank gives to a collective call and gets from it, by the shape of its array.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "schedule/collective.h"

namespace pycollective {

struct CallShape {
  std::vector<std::int64_t> agreed;  // on which all ranks must agree
  std::vector<std::int64_t> result;
  std::size_t count = 0;                // items of the whole array, or of a part; as Array::count
  std::size_t inputs = 0, outputs = 0;  // items that this rank gives and gets
};

// `shape` is that of the rank's input; of a scatter's ranks but the root, of the output. Returns
// nothing where there are no items, or where they cannot be cut into one equal part for each rank.
std::optional<CallShape> call_shape(Collective collective, const std::vector<std::int64_t>& shape,
                                    int rank, int size, int root);

}  // namespace pycollective
