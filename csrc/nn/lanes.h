// Vector values, for loops that compilers do not vectorize well. GCC and Clang split them into
// registers of the processor's size.
#pragma once

#include <cstdint>
#include <cstring>

#include "nn/window.h"

namespace pycollective::nn {

template <typename T>
struct Lanes;

template <>
struct Lanes<float> {
  static constexpr Index kCount = 16;
  typedef float Vector __attribute__((vector_size(64)));
  using Lane = std::int32_t;  // of a comparison: all bits are set where it is true
  typedef Lane Mask __attribute__((vector_size(64)));
};

template <>
struct Lanes<double> {
  static constexpr Index kCount = 8;
  typedef double Vector __attribute__((vector_size(64)));
  using Lane = std::int64_t;
  typedef Lane Mask __attribute__((vector_size(64)));
};

}  // namespace pycollective::nn
