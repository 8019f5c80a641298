#include "bindings/dtypes.h"

#include <atomic>
#include <bit>
#include <stdexcept>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace pycollective {
namespace {

constexpr int kFirstUserType = 256;

// ml_dtypes registers bfloat16 with NumPy as a type of its own, numbered from 256 on in the order
// of registration; the number is kept because asking for the name takes a microsecond.
bool is_bfloat16(const py::dtype& dtype) {
  static std::atomic<int> known{-1};
  if (dtype.num() < kFirstUserType || dtype.itemsize() != 2) return false;
  if (dtype.num() == known.load(std::memory_order_relaxed)) return true;
  if (std::string(py::str(dtype.attr("name"))) != "bfloat16") return false;
  known.store(dtype.num(), std::memory_order_relaxed);
  return true;
}

}  // namespace

std::optional<DType> find_dtype(const py::dtype& dtype) {
  // A native order may be spelt out: dtypes that come through the buffer protocol do so.
  constexpr char kNative = std::endian::native == std::endian::little ? '<' : '>';
  if (char order = dtype.byteorder(); order != '=' && order != '|' && order != kNative) return {};
  struct Known {
    char kind;
    py::ssize_t size;
    DType dtype;
  };
  constexpr Known kKnown[] = {{'f', 4, DType::f32}, {'f', 8, DType::f64},  {'f', 2, DType::f16},
                              {'i', 4, DType::i32}, {'i', 8, DType::i64},  {'i', 1, DType::i8},
                              {'i', 2, DType::i16}, {'u', 1, DType::u8},   {'u', 2, DType::u16},
                              {'u', 4, DType::u32}, {'u', 8, DType::u64},  {'b', 1, DType::boolean},
                              {'c', 8, DType::c64}, {'c', 16, DType::c128}};
  char kind = dtype.kind();
  py::ssize_t size = dtype.itemsize();
  if (dtype.num() < kFirstUserType) {
    for (const Known& known : kKnown) {
      if (known.kind == kind && known.size == size) return known.dtype;
    }
  }
  if (is_bfloat16(dtype)) return DType::bf16;
  return {};
}

std::string name_of(const py::dtype& dtype) {
  if (auto found = find_dtype(dtype)) return std::string(to_string(*found));
  return py::str(dtype);
}

DType packable(const py::dtype& dtype) {
  if (auto found = find_dtype(dtype)) return *found;
  throw py::type_error("arrays of dtype " + std::string(py::str(dtype)) + " are not packed");
}

std::pair<DType, Op> reduction_of(const py::dtype& dtype, const std::string& name) {
  auto found = find_dtype(dtype);
  if (!found) {
    std::string known;
    for (int i = 0; i < kDTypes; ++i) append_name(known, to_string(static_cast<DType>(i)));
    throw py::type_error("there is no reduction for dtype " + std::string(py::str(dtype)) +
                         "; there are: " + known + ": convert the array with astype first");
  }
  std::string known;
  for (int i = 0; i < kOps; ++i) {
    auto op = static_cast<Op>(i);
    append_name(known, to_string(op));
    if (to_string(op) != name) continue;
    if (auto why = refusal(*found, op); !why.empty()) {
      throw py::type_error("there is no '" + name + "' of " + std::string(to_string(*found)) +
                           " arrays: " + std::string(why));
    }
    return {*found, op};
  }
  throw std::invalid_argument("unknown op '" + name + "'; there are: " + known);
}

}  // namespace pycollective
