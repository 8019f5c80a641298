#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "support/asymmetric_barrier.h"

namespace pycollective {
namespace {

long membarrier(int command) { return syscall(SYS_membarrier, command, 0, 0); }

}  // namespace

bool has_light_barrier() {
  static const bool registered = membarrier(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED) == 0;
  return registered;
}

void heavy_barrier() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  // Without it the peers, on the same kernel, have no light barrier either.
  (void)membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED);
}

}  // namespace pycollective
