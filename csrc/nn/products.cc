#include "nn/products.h"

#include <algorithm>
#include <cstring>

#include "nn/processor.h"
#include "support/simd.h"

namespace pycollective::nn {
namespace {

// Rows of the right factor that are processed together. With the columns of a panel they stay in
// the first-level cache.
constexpr Index kDepth = 128;

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
