// The loops, and the table with a row for each type and a column for each operation. To add a type,
// add a row. To add an operation, add a struct to operations.h and a column.
#include "reduce/reduce.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "reduce/half.h"
#include "reduce/operations.h"
#include "support/copy.h"
#include "support/simd.h"
#include "support/tuning.h"

namespace pycollective {
namespace {

using namespace arithmetic;

// Halves have conversions instead of arithmetic.
template <const HalfType& (*kType)()>
struct Half {
  static const HalfType& type() { return kType(); }
  std::uint16_t bits;
};

template <class T>
constexpr bool is_half = false;
template <const HalfType& (*kType)()>
constexpr bool is_half<Half<kType>> = true;

// The loops. GCC's target_clones works for templates only if they are local to a file.
template <class T, class O>
PYCOLLECTIVE_INLINE void combine_loop(void* target, const void* left, const void* right,
                                      std::size_t count) {
  auto* t = static_cast<T*>(target);
  auto* l = static_cast<const T*>(left);
  auto* r = static_cast<const T*>(right);
  PYCOLLECTIVE_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i) t[i] = O::of(l[i], r[i]);
}

template <class T, class O>
PYCOLLECTIVE_CLONES void combine(void* target, const void* left, const void* right,
                                 std::size_t count) {
  combine_loop<T, O>(target, left, right, count);
}

// Products of complex numbers, compiled for processors without fused multiply-add. GCC 12 fuses in
// vector loops even if told not to, and an element's bits would depend on its index.
template <class T, class O>
void combine_unfused(void* target, const void* left, const void* right, std::size_t count) {
  combine_loop<T, O>(target, left, right, count);
}

template <class T>
PYCOLLECTIVE_CLONES void divide(void* target, std::size_t count, int size) {
  auto* t = static_cast<T*>(target);
  PYCOLLECTIVE_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i) t[i] = quotient(t[i], size);
}

// A block of halves widened to float32. It stays in the first-level cache.
constexpr std::size_t kBlock = kReduceBlockBytes / sizeof(float);
struct Block {
  alignas(kCacheLine) float items[kBlock];
};

template <class H, class O>
void combine_halves(void* target, const void* left, const void* right, std::size_t count) {
  auto* t = static_cast<std::uint16_t*>(target);
  auto* l = static_cast<const std::uint16_t*>(left);
  auto* r = static_cast<const std::uint16_t*>(right);
  const HalfType& half = H::type();
  Block a, b;
  for (std::size_t first = 0; first < count; first += kBlock) {
    std::size_t items = std::min(kBlock, count - first);
    half.widen(a.items, l + first, items);
    half.widen(b.items, r + first, items);
    combine<float, O>(a.items, a.items, b.items, items);
    half.narrow(t + first, a.items, items);
  }
}

template <class H>
void divide_halves(void* target, std::size_t count, int size) {
  auto* t = static_cast<std::uint16_t*>(target);
  const HalfType& half = H::type();
  Block a;
  for (std::size_t first = 0; first < count; first += kBlock) {
    std::size_t items = std::min(kBlock, count - first);
    half.widen(a.items, t + first, items);
    divide<float>(a.items, items, size);
    half.narrow(t + first, a.items, items);
  }
}

template <class T, class O>
constexpr Reduction entry() {
  constexpr bool divides = std::is_same_v<O, Mean>;
  if constexpr (is_half<T>) {
    Reduction made{.item = sizeof(T), .half = T::type};
    if constexpr (O::template takes<float>) {
      made.combine = combine_halves<T, O>;
      if constexpr (divides) made.finish = divide_halves<T>;
    }
    return made;
  } else {
    Reduction made{.item = sizeof(T)};
    if constexpr (O::template takes<T>) {
      using Kernel = std::conditional_t<divides, Sum, O>;
      if constexpr (is_complex<T> && std::is_same_v<O, Prod>) {
        made.combine = combine_unfused<T, O>;
      } else {
        made.combine = combine<typename O::template Same<T>, Kernel>;
      }
      if constexpr (divides) made.finish = divide<T>;
    }
    return made;
  }
}

using Row = std::array<Reduction, kOps>;

template <class T>
constexpr Row row() {  // columns in the order of Op
  return {entry<T, Sum>(),  entry<T, Prod>(), entry<T, Min>(), entry<T, Max>(),
          entry<T, Mean>(), entry<T, And>(),  entry<T, Or>(),  entry<T, Xor>()};
}

struct Element {
  std::string_view name;
  Row row;
};

constexpr std::array<Element, kDTypes> kTable = {{
    // rows in the order of DType
    {"bool", row<Truth>()},
    {"int8", row<std::int8_t>()},
    {"int16", row<std::int16_t>()},
    {"int32", row<std::int32_t>()},
    {"int64", row<std::int64_t>()},
    {"uint8", row<std::uint8_t>()},
    {"uint16", row<std::uint16_t>()},
    {"uint32", row<std::uint32_t>()},
    {"uint64", row<std::uint64_t>()},
    {"float16", row<Half<float16>>()},
    {"bfloat16", row<Half<bfloat16>>()},
    {"float32", row<float>()},
    {"float64", row<double>()},
    {"complex64", row<Complex<float>>()},
    {"complex128", row<Complex<double>>()},
}};

constexpr std::array<std::string_view, kOps> kOpNames = {"sum",  "prod", "min", "max",
                                                         "mean", "and",  "or",  "xor"};

const Element& element(DType dtype) { return kTable[static_cast<std::size_t>(dtype)]; }

}  // namespace

const Reduction& reduction(DType dtype, Op op) {
  return element(dtype).row[static_cast<std::size_t>(op)];
}

void combine_many(DType dtype, Op op, void* const* targets, std::size_t num_targets,
                  const void* const* sources, std::size_t num_sources, std::size_t count, int size,
                  std::size_t past_cache) {
  const Reduction& stored = reduction(dtype, op);
  const HalfType* half = stored.half ? &stored.half() : nullptr;
  const Reduction& computed = half ? reduction(DType::f32, op) : stored;
  auto at = [](auto* base, std::size_t bytes) {
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(base)>>,
                                    const std::byte, std::byte>;
    return static_cast<Byte*>(base) + bytes;
  };
  const std::size_t stored_targets = num_targets - past_cache;
  Block held, widened, finished;
  std::size_t block = half ? kBlock : sizeof(Block) / stored.item;
  for (std::size_t first = 0; first < count; first += block) {
    std::size_t items = std::min(block, count - first), offset = first * stored.item;
    void* target = stored_targets ? at(targets[0], offset) : static_cast<void*>(finished.items);
    auto source = [&](std::size_t k, Block& wide) -> const void* {
      const void* from = at(sources[k], offset);
      if (!half) return from;
      half->widen(wide.items, static_cast<const std::uint16_t*>(from), items);
      return wide.items;
    };
    // The last combination writes to the target, all others to the block.
    const void* so_far = source(0, held);
    for (std::size_t k = 1; k < num_sources; ++k) {
      void* to = k + 1 < num_sources || half ? held.items : target;
      computed.combine(to, so_far, source(k, widened), items);
      so_far = to;
    }
    void* result = half ? held.items : target;
    if (so_far != result) std::memcpy(result, so_far, items * stored.item);
    if (size && computed.finish) computed.finish(result, items, size);
    if (half) half->narrow(static_cast<std::uint16_t*>(target), held.items, items);
    for (std::size_t k = stored_targets ? 1 : 0; k < num_targets; ++k) {
      void* copy = at(targets[k], offset);
      if (k >= stored_targets) {
        copy_past_cache(static_cast<std::byte*>(copy), static_cast<const std::byte*>(target),
                        items * stored.item);
      } else {
        std::memcpy(copy, target, items * stored.item);
      }
    }
  }
}

std::string_view refusal(DType dtype, Op op) {
  if (reduction(dtype, op).combine) return {};
  switch (dtype) {
    case DType::boolean:
      return "bools are neither summed nor multiplied: use 'or' (any), 'and' (all) or 'xor', or "
             "count them with astype('int32') and 'sum'";
    case DType::c64:
    case DType::c128:
      return op == Op::min || op == Op::max
                 ? "complex numbers have no order: reduce their real and imaginary parts or their "
                   "absolute values"
                 : "and, or, xor are for ints and bools";
    default:
      return "and, or, xor are for ints and bools: view the array as unsigned ints to combine bits";
  }
}

std::size_t item_size(DType dtype) { return element(dtype).row[0].item; }

std::string_view to_string(DType dtype) { return element(dtype).name; }

std::string_view to_string(Op op) { return kOpNames[static_cast<std::size_t>(op)]; }

}  // namespace pycollective
