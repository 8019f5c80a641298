// The fast path of all_reduce_many from Python to the core, for a few small, plain NumPy arrays of
// one dtype, joined to one array. The general method in Python makes the same call.
#include <pybind11/numpy.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/dtypes.h"
#include "bindings/errors.h"
#include "bindings/fast_calls.h"
#include "support/interpreter_release.h"
#include "support/tuning.h"

namespace py = pybind11;

namespace pycollective {
namespace {

using py::detail::npy_api;

bool is_list(PyObject* object) { return PyList_CheckExact(object) || PyTuple_CheckExact(object); }

// Appends the shape of array number `i` to the shapes on which the ranks must agree. A scalar's
// shape is empty, so `shapes` may still be empty at the second array.
void append_shape(std::vector<std::int64_t>& shapes, Py_ssize_t i, const ArrayStruct& array) {
  if (i > 0) shapes.push_back(CallRecord::kNextArray);
  shapes.insert(shapes.end(), array.dimensions, array.dimensions + array.nd);
}

// Returns nullptr if the fast path does not support the call. Throws Python's errors.
const PreparedCall* find_or_learn(RepeatedCalls& repeated, PyObject* op, PyObject* descr,
                                  const std::vector<std::int64_t>& shapes, std::size_t bytes) {
  const Identity identity{descr, op};
  if (const PreparedCall* known = repeated.find_pack(identity, shapes)) return known;
  try {
    Reducing reducing;
    const auto elements = elements_of(descr, op, reducing);
    if (!elements || bytes == 0) return nullptr;
    return repeated.add_pack(identity, shapes, bytes / elements->item, *elements, kept(descr, op));
  } catch (const py::error_already_set&) {
    throw;  // e.g. Ctrl-C
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // namespace

PyObject* reduce_many(Base& self, const Kind*, const Arguments& arguments) {
  State& state = *self.state;
  PyObject* given = arguments[Parameter::arrays];
  PyObject* out = arguments.unless_none(Parameter::out);
  PyObject* op = arguments[Parameter::op] ? arguments[Parameter::op] : default_op();
  if (!given || !is_list(given) || PySequence_Fast_GET_SIZE(given) == 0) return Py_NotImplemented;
  if (out && !(is_list(out) && PySequence_Fast_GET_SIZE(out) == PySequence_Fast_GET_SIZE(given))) {
    return Py_NotImplemented;
  }
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(given);
  PyObject** arrays = PySequence_Fast_ITEMS(given);
  PyObject** outs = out ? PySequence_Fast_ITEMS(out) : nullptr;
  std::size_t bytes = 0;
  std::vector<std::int64_t> shapes;
  PyObject* descr = nullptr;
  std::size_t item = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const ArrayStruct* x = plain_array(arrays[i], kReadable);
    if (!x || (descr && x->descr != descr)) return Py_NotImplemented;
    if (!descr) {
      descr = x->descr;
      item = static_cast<std::size_t>(py::reinterpret_borrow<py::dtype>(descr).itemsize());
    }
    if (outs) {
      const ArrayStruct* y = plain_array(outs[i], kReadable | npy_api::NPY_ARRAY_WRITEABLE_);
      const bool same = y && y->descr == descr && y->nd == x->nd &&
                        std::equal(y->dimensions, y->dimensions + y->nd, x->dimensions);
      if (!same) return Py_NotImplemented;
    }
    append_shape(shapes, i, *x);
    std::size_t items = 1;
    for (int d = 0; d < x->nd; ++d) items *= static_cast<std::size_t>(x->dimensions[d]);
    bytes += items * item;
    if (bytes > kOneShotBytes) return Py_NotImplemented;
  }
  const PreparedCall* known = find_or_learn(state.repeated, op, descr, shapes, bytes);
  if (self.has_left(state) || !known) return Py_NotImplemented;

  const std::unique_ptr<std::byte[]> pack(new std::byte[bytes]);
  auto results = py::reinterpret_steal<py::list>(PyList_New(count));
  if (!results) throw py::error_already_set();
  std::vector<std::size_t> lengths;
  std::byte* place = pack.get();
  for (Py_ssize_t i = 0; i < count; ++i) {
    const auto* x = py::detail::array_proxy(arrays[i]);
    std::size_t length = item;
    for (int d = 0; d < x->nd; ++d) length *= static_cast<std::size_t>(x->dimensions[d]);
    PyObject* result = nullptr;
    if (outs) {
      result = Py_NewRef(outs[i]);
    } else {
      auto& api = npy_api::get();
      Py_INCREF(descr);
      result = api.PyArray_NewFromDescr_(api.PyArray_Type_, descr, x->nd, x->dimensions, nullptr,
                                         nullptr, 0, nullptr);
      if (!result) throw py::error_already_set();
    }
    PyList_SET_ITEM(results.ptr(), i, result);
    std::memcpy(place, x->data, length);
    lengths.push_back(length);
    place += length;
  }
  run_prepared(self, *known, pack.get(), pack.get(), bytes);
  place = pack.get();
  for (Py_ssize_t i = 0; i < count; ++i) {
    const std::size_t length = lengths[static_cast<std::size_t>(i)];
    std::memcpy(py::detail::array_proxy(PyList_GET_ITEM(results.ptr(), i))->data, place, length);
    place += length;
  }
  return results.release().ptr();
}

}  // namespace pycollective
