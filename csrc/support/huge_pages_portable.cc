#include "support/huge_pages.h"

// Only Linux lets a program ask.

namespace pycollective {

void prefer_huge_pages(void*, std::size_t) {}

}  // namespace pycollective
