#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

#include "support/huge_pages.h"

namespace pycollective {

void prefer_huge_pages(void* memory, std::size_t bytes) {
  auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  auto begin = reinterpret_cast<std::uintptr_t>(memory), end = begin + bytes;
  begin = (begin + page - 1) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace pycollective
