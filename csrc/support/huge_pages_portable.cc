#include "support/huge_pages.h"

// Only Linux has MADV_HUGEPAGE.

namespace pycollective {

void prefer_huge_pages(void*, std::size_t) {}

}  // namespace pycollective
