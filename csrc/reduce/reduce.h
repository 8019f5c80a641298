// The one table of element types and operations. Everything above it sees bytes and function
// pointers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace pycollective {

enum class DType : std::uint8_t { f32, f64, i32, i64 };
enum class Op : std::uint8_t { sum, min, max, prod, mean };
inline constexpr int kDTypes = 4;
inline constexpr int kOps = 5;

struct Reduction {
  // target[i] = a[i] (op) b[i]; target may be a or b. Sums and products of ints wrap around; min
  // and max give NaN where either is NaN, as NumPy does.
  void (*combine)(void* target, const void* a, const void* b, std::size_t count);
  // What is left to do when all `size` contributions are in, or nullptr: a mean divides (ints
  // toward zero, as NCCL does).
  void (*finish)(void* target, std::size_t count, int size);
};

const Reduction& reduction(DType dtype, Op op);

std::size_t item_size(DType dtype);
std::string_view to_string(DType dtype);
std::string_view to_string(Op op);

}  // namespace pycollective
