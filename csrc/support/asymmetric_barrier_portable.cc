#include "support/asymmetric_barrier.h"

namespace pycollective {

bool has_light_barrier() { return false; }

void heavy_barrier() { std::atomic_thread_fence(std::memory_order_seq_cst); }

}  // namespace pycollective
