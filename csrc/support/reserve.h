// Memory that a process frees when an allocation has failed: the messages that report the failure
// to the other ranks need memory. Only address space is used; no page is touched.
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
