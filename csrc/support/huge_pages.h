#pragma once

#include <cstddef>

namespace pycollective {

// Requests huge pages for memory that has not been touched yet. Does nothing where the system has
// no such request.
void prefer_huge_pages(void* memory, std::size_t bytes);

}  // namespace pycollective
