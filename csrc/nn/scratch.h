// Working memory that each thread keeps between calls, because new memory is slow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "nn/window.h"

namespace pycollective::nn {

// The numbers in the widest register.
inline constexpr Index kWidest = 16;

inline Index round_up(Index n, Index unit) { return (n + unit - 1) / unit * unit; }

// Pieces of one block of memory, aligned to 64 bytes. Their content is undefined.
class Scratch {
 public:
  // Provides memory for `numbers` numbers in `pieces` pieces. Invalidates all earlier pieces.
  void reserve(Index numbers, int pieces) {
    const std::size_t size = static_cast<std::size_t>(numbers + (pieces + 1) * kWidest);
    if (memory_.size() < size) memory_.assign(size, 0.0f);
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data()) / sizeof(float);
    used_ = static_cast<std::size_t>(-address % kWidest);
  }
  float* take(Index numbers) {
    float* piece = memory_.data() + used_;
    used_ += static_cast<std::size_t>(round_up(numbers, kWidest));
    return piece;
  }

 private:
  std::vector<float> memory_;
  std::size_t used_ = 0;
};

}  // namespace pycollective::nn
