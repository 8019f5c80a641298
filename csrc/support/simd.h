// What helps compilers to vectorise.
//
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

// For what is called in such a function: it is compiled again for each instruction set. nvcc
// compiles it for GPUs too.
#ifdef __CUDACC__
#define PYCOLLECTIVE_INLINE __host__ __device__ __forceinline__
#else
#define PYCOLLECTIVE_INLINE inline __attribute__((always_inline))
#endif

// Before a loop of which no turn reads what another one writes. Arrays may be the same one, element
// for element, which the compiler cannot tell from arrays that are shifted against each other.
#if defined(__clang__)
#define PYCOLLECTIVE_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define PYCOLLECTIVE_INDEPENDENT _Pragma("GCC ivdep")
#else
#define PYCOLLECTIVE_INDEPENDENT
#endif
