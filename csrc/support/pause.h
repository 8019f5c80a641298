// A pause between two polls of memory that another thread will change.
#pragma once

namespace pycollective {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace pycollective
