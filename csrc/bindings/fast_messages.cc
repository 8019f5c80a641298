// The fast path of messages between two ranks from Python to the core, for plain NumPy arrays. All
// other calls go to the general methods in Python.
#include <pybind11/numpy.h>

#include <climits>
#include <memory>
#include <vector>

#include "bindings/communicator.h"
#include "bindings/dtypes.h"
#include "bindings/errors.h"
#include "bindings/fast_calls.h"

namespace py = pybind11;

namespace pycollective {
namespace {

using py::detail::npy_api;

// Returns nullptr if the fast path does not support the array's items. Throws Python's errors.
const Envelope* envelope_of(RepeatedCalls& repeated, const ArrayStruct& array) {
  const Lengths shape = lengths_of(array);
  if (const Envelope* known = repeated.find_message(array.descr, shape)) return known;
  Reducing none;
  const auto elements = elements_of(array.descr, nullptr, none);
  if (!elements) return nullptr;
  return repeated.add_message(array.descr, shape, *elements, kept(array.descr));
}

PyObject* exchange_message(Base& self, bool sends, const Arguments& arguments) {
  State& state = *self.state;
  PyObject* given = arguments[sends ? Parameter::x : Parameter::out];
  PyObject* other = arguments[sends ? Parameter::dest : Parameter::source];
  PyObject* given_tag = arguments[Parameter::tag];
  int peer = -1, tag = 0;
  bool later = false;
  if (!given || !other || !read_async_op(arguments, later) ||
      !read_number(other, state.communicator->size() - 1, peer) ||
      (given_tag && !read_number(given_tag, INT_MAX, tag))) {
    return Py_NotImplemented;
  }
  const ArrayStruct* array =
      plain_array(given, sends ? kReadable : kReadable | npy_api::NPY_ARRAY_WRITEABLE_);
  if (!array) return Py_NotImplemented;
  const Envelope* known = envelope_of(state.repeated, *array);
  if (self.has_left(state) || !known) return Py_NotImplemented;
  Envelope envelope = *known;
  envelope.tag = tag;
  PyObject* result = sends ? Py_None : given;
  if (later) {
    const auto task = state.communicator->messages().post(
        sends, peer, envelope, array->data, waiting_for(self.timeout, {}), kept(given));
    return new_work(task, result);
  }
  // While the GIL is released, another thread may close the communicator.
  const std::shared_ptr<Communicator> communicator = state.communicator;
  const auto array_kept = py::reinterpret_borrow<py::object>(given);
  Message message(sends, peer, envelope, array->data);
  exchange(*communicator, message, self.timeout);
  return Py_NewRef(result);
}

}  // namespace

PyObject* send_message(Base& self, const Kind*, const Arguments& arguments) {
  return exchange_message(self, true, arguments);
}

PyObject* receive_message(Base& self, const Kind*, const Arguments& arguments) {
  return exchange_message(self, false, arguments);
}

}  // namespace pycollective
