#pragma once

#include <cstddef>

namespace pycollective {

// Asks for huge pages for memory that has not been touched yet; where there are none, nothing
// happens.
void prefer_huge_pages(void* memory, std::size_t bytes);

}  // namespace pycollective
