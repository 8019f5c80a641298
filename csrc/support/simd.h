// Functions marked PYCOLLECTIVE_CLONES are compiled for several instruction sets and the loader
// picks the best one for the processor it runs on, where the compiler and the system can do that.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define PYCOLLECTIVE_CLONES \
  __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define PYCOLLECTIVE_CLONES
#endif
