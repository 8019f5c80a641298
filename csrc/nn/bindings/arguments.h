// Checks of the kernels' arguments. Every array is checked before a kernel runs without the GIL.
#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>

#include "nn/bindings/record.h"
#include "nn/kernels.h"

namespace pycollective {

using nn::Index;
using nn::Window;
using Array = pybind11::array;
using MaybeArray = std::optional<pybind11::array>;

inline std::string shape_text(const Array& a) {
  return pybind11::str(a.attr("shape")).cast<std::string>();
}

template <typename T>
void check(const Array& a, const char* name, Index size, bool writeable) {
  if (!pybind11::isinstance<pybind11::array_t<T>>(a)) {
    throw pybind11::value_error(std::string(name) + " has dtype " +
                                pybind11::str(a.dtype()).cast<std::string>() + ", expected " +
                                pybind11::str(pybind11::dtype::of<T>()).cast<std::string>());
  }
  if (!(a.flags() & pybind11::array::c_style)) {
    throw pybind11::value_error(std::string(name) + " of shape " + shape_text(a) +
                                " is not contiguous in C order");
  }
  if (a.size() != size) {
    throw pybind11::value_error(std::string(name) + " has shape " + shape_text(a) + ", which is " +
                                std::to_string(a.size()) + " elements; expected " +
                                std::to_string(size));
  }
  if (writeable && !a.writeable()) {
    throw pybind11::value_error(std::string(name) + " of shape " + shape_text(a) + " is read-only");
  }
}

// For kernels that run in `launch`.
template <typename T>
Operand<T> operand(const Array& a, const char* name, Index size, Record::Access access) {
  check<std::remove_const_t<T>>(a, name, size, !std::is_const_v<T>);
  Operand<T> found{static_cast<T*>(const_cast<void*>(a.data()))};
  if (Record* record = Record::active()) {
    std::tie(found.buffer, found.offset) = record->buffer_of(a, access);
  }
  return found;
}

template <typename T>
Operand<const T> reads(const Array& a, const char* name, Index size) {
  return operand<const T>(a, name, size, Record::Access::kRead);
}

template <typename T>
Operand<const T> reads(const MaybeArray& a, const char* name, Index size) {
  return a ? reads<T>(*a, name, size) : Operand<const T>{};
}

// The kernel must write every element, and read none of the old ones.
template <typename T>
Operand<T> writes(Array& a, const char* name, Index size) {
  return operand<T>(a, name, size, Record::Access::kWrite);
}

template <typename T>
Operand<T> writes(MaybeArray& a, const char* name, Index size) {
  return a ? writes<T>(*a, name, size) : Operand<T>{};
}

// For all other kernels, which cannot be recorded.
inline void refuse_record() {
  if (Record* record = Record::active()) record->refuse("a kernel ran that cannot be recorded");
}

template <typename T>
const T* in(const Array& a, const char* name, Index size) {
  refuse_record();
  check<T>(a, name, size, false);
  return static_cast<const T*>(a.data());
}

template <typename T>
const T* in(const MaybeArray& a, const char* name, Index size) {
  return a ? in<T>(*a, name, size) : nullptr;
}

template <typename T>
T* out(Array& a, const char* name, Index size) {
  refuse_record();
  check<T>(a, name, size, true);
  return static_cast<T*>(a.mutable_data());
}

template <typename T>
T* out(MaybeArray& a, const char* name, Index size) {
  return a ? out<T>(*a, name, size) : nullptr;
}

// Calls `body` with a zero of the array's element type.
template <typename Body>
void with_real(const Array& a, const char* name, Body body) {
  if (pybind11::isinstance<pybind11::array_t<float>>(a)) {
    body(float{});
  } else if (pybind11::isinstance<pybind11::array_t<double>>(a)) {
    body(double{});
  } else {
    throw pybind11::value_error(std::string(name) + " has dtype " +
                                pybind11::str(a.dtype()).cast<std::string>() +
                                "; the compiled kernels take float32 and float64");
  }
}

// Returns the number of blocks of `unit` elements in the array.
inline Index count(const Array& a, const char* name, Index unit) {
  if (a.size() % unit != 0) {
    throw pybind11::value_error(std::string(name) + " of shape " + shape_text(a) +
                                " is not a whole number of blocks of " + std::to_string(unit) +
                                " elements");
  }
  return a.size() / unit;
}

// Returns the product of two sizes. Throws if it overflows: no array can have that size.
inline Index area(Index a, Index b) {
  Index product;
  if (__builtin_mul_overflow(a, b, &product)) throw pybind11::value_error("sizes overflow");
  return product;
}

inline void check_pool(const Window& pool, Index taps) {
  if (pool.dilation_h != 1 || pool.dilation_w != 1) {
    throw pybind11::value_error("pooling windows must have dilation 1");
  }
  if (pool.taps() > taps) {
    throw pybind11::value_error("a pooling window of " + std::to_string(pool.taps()) +
                                " taps does not fit the type of the codes");
  }
}

// Codes may come from outside the kernels: a code beyond the window would write outside the image.
template <typename Code>
void check_codes(const Code* codes, Index size, const Window& pool) {
  const bool good = nn::codes_fit(codes, size, static_cast<Code>(pool.taps()));
  if (!good) throw pybind11::value_error("codes name a tap outside the pooling window");
}

}  // namespace pycollective
