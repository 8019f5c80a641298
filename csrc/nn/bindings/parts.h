// For short kernels: the size from which they use several threads and release the GIL.
#pragma once

#include <algorithm>

#include "support/parallel.h"

namespace pycollective {

// A kernel processes this many numbers in less time than reacquiring the GIL may take.
inline constexpr nn::Index kBrief = 1 << 16;

// Calls body(first, last) for parts of `size` numbers. For few numbers, waking other threads takes
// longer than it saves.
template <typename Body>
void by_parts(nn::Index size, const Body& body) {
  constexpr nn::Index kLeast = 1 << 15;
  const int parts = static_cast<int>(std::clamp<nn::Index>(size / kLeast, 1, threads()));
  in_parallel(parts, [&](int part) {
    body(begin_of_part(size, part, parts), begin_of_part(size, part + 1, parts));
  });
}

}  // namespace pycollective
