#include "support/huge_pages.h"

// Only Linux has a request for huge pages.

namespace pycollective {

void prefer_huge_pages(void*, std::size_t) {}

}  // namespace pycollective
