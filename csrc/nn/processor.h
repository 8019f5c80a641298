// Which instruction sets the kernels of this room use on this processor.
//
// Their inner loops stand in .inc files that are included once per instruction set, each time in a
// namespace of its own: PYCOLLECTIVE_TARGET is the attribute that names the set, and
// PYCOLLECTIVE_VECTOR_BYTES the width of its registers. (Values of vector type are split by what a
// function is declared for, before target_clones makes its copies.)
#pragma once

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define PYCOLLECTIVE_X86_TARGETS
#endif

namespace pycollective::nn {

// The width of the registers that the kernels use: 64 (AVX-512), 32 (AVX2) or 16.
int vector_bytes();

// Lets the kernels use no wider registers than these, for tests of the narrower ones; returns the
// limit before.
int limit_vector_bytes(int bytes);

}  // namespace pycollective::nn
