// Short kernels: from which size on other threads help, and the interpreter lock is released.
#pragma once

#include <algorithm>

#include "nn/parallel.h"

namespace pycollective {

// A kernel passes over this many numbers in less time than it may take to get the lock back.
inline constexpr nn::Index kBrief = 1 << 16;

// Calls body(first, last) for parts of `size` numbers; few are not worth waking other threads.
template <typename Body>
void by_parts(nn::Index size, const Body& body) {
  constexpr nn::Index kLeast = 1 << 15;
  const int parts = static_cast<int>(std::clamp<nn::Index>(size / kLeast, 1, nn::threads()));
  nn::in_parallel(parts, [&](int part) {
    body(nn::begin_of_part(size, part, parts), nn::begin_of_part(size, part + 1, parts));
  });
}

}  // namespace pycollective
