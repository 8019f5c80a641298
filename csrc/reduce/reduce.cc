#include "reduce/reduce.h"

#include <array>

#include "support/simd.h"

namespace pycollective {
namespace {

// Ints are added and multiplied as unsigned numbers: they wrap around, where signed ones would be
// undefined.
template <class T>
struct Wrapping {
  using type = T;
};
template <>
struct Wrapping<std::int32_t> {
  using type = std::uint32_t;
};
template <>
struct Wrapping<std::int64_t> {
  using type = std::uint64_t;
};

// target_clones needs plain functions, so the kernels come from a macro and not from a template.
#define PYCOLLECTIVE_COMBINE(NAME, T, EXPRESSION)                                  \
  PYCOLLECTIVE_CLONES void NAME(void* target, const void* left, const void* right, \
                                std::size_t count) {                               \
    using W [[maybe_unused]] = Wrapping<T>::type;                                  \
    auto* t = static_cast<T*>(target);                                             \
    auto* l = static_cast<const T*>(left);                                         \
    auto* r = static_cast<const T*>(right);                                        \
    for (std::size_t i = 0; i < count; ++i) {                                      \
      T a = l[i], b = r[i];                                                        \
      t[i] = static_cast<T>(EXPRESSION);                                           \
    }                                                                              \
  }

#define PYCOLLECTIVE_KERNELS(SUFFIX, T)                                                 \
  PYCOLLECTIVE_COMBINE(sum_##SUFFIX, T, W(a) + W(b))                                    \
  PYCOLLECTIVE_COMBINE(prod_##SUFFIX, T, W(a) * W(b))                                   \
  PYCOLLECTIVE_COMBINE(min_##SUFFIX, T, (a < b || a != a) ? a : b)                      \
  PYCOLLECTIVE_COMBINE(max_##SUFFIX, T, (a > b || a != a) ? a : b)                      \
  PYCOLLECTIVE_CLONES void divide_##SUFFIX(void* target, std::size_t count, int size) { \
    auto* t = static_cast<T*>(target);                                                  \
    T divisor = static_cast<T>(size);                                                   \
    for (std::size_t i = 0; i < count; ++i) t[i] = t[i] / divisor;                      \
  }

PYCOLLECTIVE_KERNELS(f32, float)
PYCOLLECTIVE_KERNELS(f64, double)
PYCOLLECTIVE_KERNELS(i32, std::int32_t)
PYCOLLECTIVE_KERNELS(i64, std::int64_t)

#define PYCOLLECTIVE_ROW(SUFFIX)                                                 \
  {                                                                              \
    {                                                                            \
      {sum_##SUFFIX, nullptr}, {min_##SUFFIX, nullptr}, {max_##SUFFIX, nullptr}, \
          {prod_##SUFFIX, nullptr}, {                                            \
        sum_##SUFFIX, divide_##SUFFIX                                            \
      }                                                                          \
    }                                                                            \
  }

// Rows in the order of DType, columns in the order of Op.
constexpr std::array<std::array<Reduction, kOps>, kDTypes> kTable = {
    {PYCOLLECTIVE_ROW(f32), PYCOLLECTIVE_ROW(f64), PYCOLLECTIVE_ROW(i32), PYCOLLECTIVE_ROW(i64)}};

}  // namespace

const Reduction& reduction(DType dtype, Op op) {
  return kTable[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)];
}

std::size_t item_size(DType dtype) { return dtype == DType::f32 || dtype == DType::i32 ? 4 : 8; }

std::string_view to_string(DType dtype) {
  constexpr std::string_view names[kDTypes] = {"float32", "float64", "int32", "int64"};
  return names[static_cast<std::size_t>(dtype)];
}

std::string_view to_string(Op op) {
  constexpr std::string_view names[kOps] = {"sum", "min", "max", "prod", "mean"};
  return names[static_cast<std::size_t>(op)];
}

}  // namespace pycollective
