// Memory that a process keeps for the moment when it finds no other: its error must still reach the
// other ranks, and messages need memory. Address space only; no page of it is touched.
#pragma once

#include <atomic>
#include <cstdlib>

#include "support/tuning.h"

namespace pycollective {

inline std::atomic<void*>& reserve() {
  static std::atomic<void*> block{nullptr};
  return block;
}

inline void keep_reserve() noexcept {
  if (reserve().load()) return;
  void* none = nullptr;
  void* block = std::malloc(kReserveBytes);
  if (!reserve().compare_exchange_strong(none, block)) std::free(block);
}

inline void use_reserve() noexcept { std::free(reserve().exchange(nullptr)); }

}  // namespace pycollective
