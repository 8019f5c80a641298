// The short way of messages between two ranks from Python to the core: plain NumPy arrays, and a
// call that waits. All else goes to the methods in Python.
#include <pybind11/numpy.h>

#include <climits>
#include <memory>
#include <vector>

#include "bindings/communicator.h"
#include "bindings/errors.h"
#include "bindings/fast_calls.h"

namespace py = pybind11;

namespace pycollective {
namespace {

using py::detail::npy_api;

PyObject *name_x, *name_dest, *name_tag, *name_out, *name_source;

struct Arguments {
  PyObject* array = nullptr;
  int peer = -1;
  int tag = 0;
};

bool set_number(PyObject* value, int limit, int& found) {
  if (!PyLong_CheckExact(value)) return false;
  int overflow = 0;
  const long number = PyLong_AsLongAndOverflow(value, &overflow);
  if (overflow || number < 0 || number > limit) return false;
  found = static_cast<int>(number);
  return true;
}

// Returns true if the short way takes these arguments. Raises nothing if it does not.
bool parse(PyObject* array_name, PyObject* peer_name, int size, PyObject* const* args,
           std::size_t positional, PyObject* names, Arguments& found) {
  if (positional > 3) return false;
  if (positional > 0) found.array = args[0];
  if (positional > 1 && !set_number(args[1], size - 1, found.peer)) return false;
  if (positional > 2 && !set_number(args[2], INT_MAX, found.tag)) return false;
  const Py_ssize_t count = names ? PyTuple_GET_SIZE(names) : 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* name = PyTuple_GET_ITEM(names, i);
    PyObject* value = args[positional + static_cast<std::size_t>(i)];
    if (name == array_name && positional < 1) {
      found.array = value;
    } else if (name == peer_name && positional < 2) {
      if (!set_number(value, size - 1, found.peer)) return false;
    } else if (name == name_tag && positional < 3) {
      if (!set_number(value, INT_MAX, found.tag)) return false;
    } else {
      return false;
    }
  }
  return found.array && found.peer >= 0;
}

// Returns nullptr where an array's items are none for the short way. Throws what Python raises.
const Envelope* envelope_of(State& state, const ArrayStruct& array) {
  constexpr std::uint64_t kHasObject = 1;  // NPY_ITEM_REFCOUNT
  for (const KnownMessage& known : state.messages) {
    if (known.descr.ptr() == array.descr && known.envelope.dims == array.nd &&
        std::equal(array.dimensions, array.dimensions + array.nd, known.envelope.shape)) {
      return &known.envelope;
    }
  }
  auto dtype = py::reinterpret_borrow<py::dtype>(array.descr);
  if (static_cast<std::uint64_t>(dtype.flags()) & kHasObject) return nullptr;
  const std::vector<std::int64_t> shape(array.dimensions, array.dimensions + array.nd);
  auto bytes = static_cast<std::uint64_t>(dtype.itemsize());
  for (std::int64_t length : shape) bytes *= static_cast<std::uint64_t>(length);
  KnownMessage& known = state.messages[state.oldest_message];
  known.descr = py::object();  // nothing is known while this fails
  known.envelope = Envelope(std::string(py::str(dtype)), shape.data(), array.nd, bytes);
  known.descr = dtype;
  state.oldest_message = (state.oldest_message + 1) % state.messages.size();
  return &known.envelope;
}

PyObject* exchange_message(Base& self, bool sends, PyObject* const* args, std::size_t positional,
                           PyObject* names) {
  constexpr int kReadable = npy_api::NPY_ARRAY_C_CONTIGUOUS_ | npy_api::NPY_ARRAY_ALIGNED_;
  State& state = *self.state;
  Arguments found;
  if (!parse(sends ? name_x : name_out, sends ? name_dest : name_source, state.communicator->size(),
             args, positional, names, found)) {
    return Py_NotImplemented;
  }
  const ArrayStruct* array =
      plain_array(found.array, sends ? kReadable : kReadable | npy_api::NPY_ARRAY_WRITEABLE_);
  if (!array) return Py_NotImplemented;
  try {
    const Envelope* known = envelope_of(state, *array);
    if (!known) return Py_NotImplemented;
    Envelope envelope = *known;
    envelope.tag = found.tag;
    // While the interpreter is released, another thread may close the communicator.
    const std::shared_ptr<Communicator> communicator = state.communicator;
    const auto kept = py::reinterpret_borrow<py::object>(found.array);
    Message message(sends, found.peer, envelope, array->data);
    exchange(*communicator, message, self.timeout);
    return Py_NewRef(sends ? Py_None : found.array);
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

}  // namespace

void prepare_messages() {
  auto intern = [](const char* text) { return PyUnicode_InternFromString(text); };
  name_x = intern("x"), name_dest = intern("dest"), name_tag = intern("tag");
  name_out = intern("out"), name_source = intern("source");
}

PyObject* send_message(Base& self, const Kind*, PyObject* const* args, std::size_t positional,
                       PyObject* names) {
  return exchange_message(self, true, args, positional, names);
}

PyObject* receive_message(Base& self, const Kind*, PyObject* const* args, std::size_t positional,
                          PyObject* names) {
  return exchange_message(self, false, args, positional, names);
}

}  // namespace pycollective
