#include "nn/products.h"

#include <algorithm>
#include <cstring>

#include "nn/processor.h"
#include "support/simd.h"

namespace pycollective::nn {
namespace {

// The sizes of blocks: rows of a left factor that is copied, columns of a right factor that is
// copied, and their common depth. Both copies stay in the second-level cache, and a panel of the
// right one in the first-level cache.
constexpr Index kBlockRows = 240, kBlockColumns = 256, kDepth = 256;
// The depth of blocks if the right factor is not copied. Its rows are then read side by side.
constexpr Index kDirectDepth = 16;

#define PYCOLLECTIVE_LOOPS "nn/products.inc"
#include "nn/targets.inc"

}  // namespace

Products pick_products() {
#ifdef PYCOLLECTIVE_X86_TARGETS
  switch (vector_bytes()) {
    case 64:
      return {avx512::multiply, avx512::count_panels, avx512::pack};
    case 32:
      return {avx2::multiply, avx2::count_panels, avx2::pack};
  }
#endif
  return {base::multiply, base::count_panels, base::pack};
}

}  // namespace pycollective::nn
