#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "support/asymmetric_barrier.h"

namespace pycollective {
namespace {

long membarrier(int command) { return syscall(SYS_membarrier, command, 0, 0); }

}  // namespace

bool can_interrupt() {
  static const bool can = membarrier(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED) == 0 &&
                          membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED) == 0;
  return can;
}

bool heavy_barrier() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED) == 0;
}

}  // namespace pycollective
