// Sets the thread's name for debuggers, `top -H` and profilers.
#pragma once

#if defined(__linux__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace pycollective {

// `name` has at most 15 characters, Linux's limit.
inline void name_this_thread([[maybe_unused]] const char* name) {
#if defined(__linux__)
  pthread_setname_np(pthread_self(), name);
#elif defined(__APPLE__)
  pthread_setname_np(name);
#endif
}

}  // namespace pycollective
