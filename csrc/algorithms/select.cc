// Which algorithm algorithm="auto" means: one table.
#include "algorithms/algorithms.h"

namespace pycollective {

const Algorithm& select_all_reduce(std::size_t, int) { return ring_all_reduce(); }

}  // namespace pycollective
