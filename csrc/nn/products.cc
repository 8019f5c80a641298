#include "nn/products.h"

#include <algorithm>
#include <cstring>

#include "nn/processor.h"
#include "support/simd.h"

namespace pycollective::nn {
namespace {

// Rows of the right factor that are used together: with a panel's columns they stay in the
// first-level cache.
constexpr Index kDepth = 128;

namespace base {
#define PYCOLLECTIVE_TARGET
#define PYCOLLECTIVE_VECTOR_BYTES 16
#include "nn/products.inc"
#undef PYCOLLECTIVE_TARGET
#undef PYCOLLECTIVE_VECTOR_BYTES
}  // namespace base

#ifdef PYCOLLECTIVE_X86_TARGETS
namespace avx2 {
#define PYCOLLECTIVE_TARGET __attribute__((target("arch=x86-64-v3")))
#define PYCOLLECTIVE_VECTOR_BYTES 32
#include "nn/products.inc"
#undef PYCOLLECTIVE_TARGET
#undef PYCOLLECTIVE_VECTOR_BYTES
}  // namespace avx2
namespace avx512 {
#define PYCOLLECTIVE_TARGET __attribute__((target("arch=x86-64-v4")))
#define PYCOLLECTIVE_VECTOR_BYTES 64
#include "nn/products.inc"
#undef PYCOLLECTIVE_TARGET
#undef PYCOLLECTIVE_VECTOR_BYTES
}  // namespace avx512
#endif

}  // namespace

Products pick_products() {
#ifdef PYCOLLECTIVE_X86_TARGETS
  switch (vector_bytes()) {
    case 64:
      return {avx512::multiply, avx512::count_panels};
    case 32:
      return {avx2::multiply, avx2::count_panels};
  }
#endif
  return {base::multiply, base::count_panels};
}

}  // namespace pycollective::nn
