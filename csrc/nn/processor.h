// The instruction sets that the kernels use on this processor.
//
// The kernels' inner loops are in .inc files, which are included once per instruction set, each
// time in another namespace. PYCOLLECTIVE_TARGET is the attribute of the instruction set.
// PYCOLLECTIVE_VECTOR_BYTES is the width of its registers. target_clones does not work for these
// loops: GCC splits vector values for the function's own target before it clones the function.
// Builds with ThreadSanitizer have the baseline's loops alone: threads share the same memory in all
// loops.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__)
#define PYCOLLECTIVE_X86_TARGETS
#endif

namespace pycollective::nn {

// Returns the width of the registers that the kernels use: 64 (AVX-512), 32 (AVX2) or 16.
int vector_bytes();

// Limits the width of the registers, to test the kernels for narrower ones. Returns the previous
// limit.
int limit_vector_bytes(int bytes);

}  // namespace pycollective::nn
