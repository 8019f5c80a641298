#include "support/asymmetric_barrier.h"

namespace pycollective {

bool can_interrupt() { return false; }

bool heavy_barrier() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return false;
}

}  // namespace pycollective
