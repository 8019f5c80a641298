// The only table of element types and operations. Its callers see bytes and function pointers.
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

// An entry of the table. combine is nullptr if the type does not have the operation.
//
// Sums and products of ints wrap around. As in NumPy, min and max give NaN if either element is
// NaN. The operations and, or, xor are bitwise for ints and logical for bools, where every byte but
// 0 is true. float16 and bfloat16 are combined in float32 and rounded once, to nearest even.
struct Reduction {
  // target[i] = a[i] (op) b[i]. The target may be a or b, but must not overlap them otherwise.
  void (*combine)(void* target, const void* a, const void* b, std::size_t count) = nullptr;
  // Finishes the result of `size` contributions, or is nullptr. A mean divides (ints toward zero,
  // like NCCL).
  void (*finish)(void* target, std::size_t count, int size) = nullptr;

  std::size_t item = 0;                 // bytes of an element
  const HalfType& (*half)() = nullptr;  // conversions, for float16 and bfloat16
};

const Reduction& reduction(DType dtype, Op op);

// Combines `num_sources` arrays (at least 1) in order, reads each of them once, and writes the
// result to every target. float16 and bfloat16 are accumulated in float32 and rounded once, at the
// end. If `size` is not 0, it is the total number of contributions, and finish() is applied too. A
// target may be one of the sources, but must not overlap a source otherwise. The last `past_cache`
// targets are written past the caches (support/copy.h).
void combine_many(DType dtype, Op op, void* const* targets, std::size_t num_targets,
                  const void* const* sources, std::size_t num_sources, std::size_t count,
                  int size = 0, std::size_t past_cache = 0);

// Explains why the type does not have the operation, and suggests an alternative. Returns an empty
// text if the type has the operation.
std::string_view refusal(DType dtype, Op op);

std::size_t item_size(DType dtype);
std::string_view to_string(DType dtype);
std::string_view to_string(Op op);

}  // namespace pycollective
