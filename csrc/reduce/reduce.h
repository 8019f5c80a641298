// The one table of element types and operations. Everything above it sees bytes and function
// pointers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace pycollective {

enum class DType : std::uint8_t {
  boolean,
  i8,
  i16,
  i32,
  i64,
  u8,
  u16,
  u32,
  u64,
  f16,
  bf16,
  f32,
  f64,
  c64,
  c128
};
enum class Op : std::uint8_t { sum, prod, min, max, mean, band, bor, bxor };
inline constexpr int kDTypes = 15;
inline constexpr int kOps = 8;

struct HalfType;

// A place of the table. Where the operation has no meaning for the type, combine is nullptr.
//
// Sums and products of ints wrap around; min and max give NaN where either is NaN, as NumPy does;
// and, or, xor are bitwise for ints and logical for bools, of which every byte but 0 is true.
// float16 and bfloat16 are combined in float32 and rounded once, to nearest even.
struct Reduction {
  // target[i] = a[i] (op) b[i]; target may be a or b, but not overlap them otherwise.
  void (*combine)(void* target, const void* a, const void* b, std::size_t count) = nullptr;
  // What is left to do when all `size` contributions are in, or nullptr: a mean divides (ints
  // toward zero, as NCCL does).
  void (*finish)(void* target, std::size_t count, int size) = nullptr;

  std::size_t item = 0;                 // bytes of an element
  const HalfType& (*half)() = nullptr;  // of float16 and bfloat16: how to widen and narrow them
};

const Reduction& reduction(DType dtype, Op op);

// Combines `num_sources` arrays (at least 1) in their order, reads each of them once, and writes
// the result to every target. float16 and bfloat16 are summed up in float32 and rounded once, at
// the end. `size`, where it is not 0, is the number of contributions that are in now: what finish()
// does is done as well. A target may be one of the sources, but not overlap one otherwise.
void combine_many(DType dtype, Op op, void* const* targets, std::size_t num_targets,
                  const void* const* sources, std::size_t num_sources, std::size_t count,
                  int size = 0);

// Why the table has no such place, and what to do instead.
std::string_view refusal(DType dtype, Op op);

std::size_t item_size(DType dtype);
std::string_view to_string(DType dtype);
std::string_view to_string(Op op);

}  // namespace pycollective
