// Macros that help compilers to vectorize.
//
// PYCOLLECTIVE_CLONES compiles a function for several instruction sets. The loader picks the best
// one for the processor, if compiler and system support that.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define PYCOLLECTIVE_CLONES \
  __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define PYCOLLECTIVE_CLONES
#endif

// For functions that a function with PYCOLLECTIVE_CLONES calls: they are compiled again for each
// instruction set. With nvcc, they are compiled for GPUs too.
#ifdef __CUDACC__
#define PYCOLLECTIVE_INLINE __host__ __device__ __forceinline__
#else
#define PYCOLLECTIVE_INLINE inline __attribute__((always_inline))
#endif

// Marks a loop whose iterations do not depend on each other. Compilers cannot know this, because
// two of its arrays may be the same array.
#if defined(__clang__)
#define PYCOLLECTIVE_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define PYCOLLECTIVE_INDEPENDENT _Pragma("GCC ivdep")
#else
#define PYCOLLECTIVE_INDEPENDENT
#endif
