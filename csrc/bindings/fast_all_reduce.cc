// The short way of Communicator.all_reduce from Python to the direct path.
//
// A call of some hundred nanoseconds has no time for pybind11's conversions, nor for Python's own
// statements. `fast_all_reduce(method)` makes a method that looks at the arguments itself: plain
// NumPy arrays that need no preparation, in a group that shares a board, go to the core at once;
// all else goes to the method in Python, which is right for everything. What a program repeats
// (shape, dtype, op) is kept prepared.
#include <pybind11/numpy.h>
#include <structmember.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/dtypes.h"
#include "bindings/errors.h"
#include "bindings/interpreter_release.h"
#include "executor/communicator.h"
#include "support/tuning.h"
#include "support/waiter.h"

namespace py = pybind11;

namespace pycollective {
namespace {

using ArrayStruct = py::detail::PyArray_Proxy;
using py::detail::npy_api;

// A call as it was made before.
struct Known {
  py::object descr, op;  // compared by identity, so they are kept
  int dims = -1;         // -1: nothing is known here
  std::array<Py_intptr_t, CallRecord::kMaxDims> shape{};
  bool automatic = false;  // whether "auto" means "direct" for it
  PreparedAllReduce prepared;
};

// What a Communicator in Python inherits: its end of the core.
struct State {
  std::shared_ptr<Communicator> communicator;
  bool threads = false;
  int looks = 1;  // for the peers, while the interpreter is kept
  std::array<Known, 8> known;
  std::size_t last = 0, oldest = 0;
};

struct Base {
  PyObject_HEAD State* state;  // nullptr: not attached, or closed
  double timeout;              // seconds that it waits unless a call says otherwise; checked
};

struct Method {
  PyObject_HEAD vectorcallfunc call;
  PyObject* general;
};

PyTypeObject* base_type = nullptr;
PyTypeObject* method_type = nullptr;
PyObject* array_type = nullptr;
PyObject *name_x, *name_op, *name_out, *name_algorithm, *name_sum, *name_auto, *name_direct;

struct Arguments {
  PyObject *x = nullptr, *out = nullptr, *op = name_sum;
  bool automatic = true;  // "auto", not "direct"
};

bool is_name(PyObject* object, PyObject* name) {
  return object == name || (PyUnicode_CheckExact(object) && PyUnicode_Compare(object, name) == 0);
}

// Whether these are arguments for the short way; nothing is raised if they are not.
bool parse(PyObject* const* args, std::size_t positional, PyObject* names, Arguments& found) {
  if (positional > 2) return false;
  if (positional > 0) found.x = args[0];
  if (positional > 1) found.op = args[1];
  Py_ssize_t count = names ? PyTuple_GET_SIZE(names) : 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* name = PyTuple_GET_ITEM(names, i);
    PyObject* value = args[positional + static_cast<std::size_t>(i)];
    if (name == name_out) {
      found.out = value == Py_None ? nullptr : value;
    } else if (name == name_op && positional < 2) {
      found.op = value;
    } else if (name == name_x && positional < 1) {
      found.x = value;
    } else if (name == name_algorithm && is_name(value, name_direct)) {
      found.automatic = false;
    } else if (name != name_algorithm || !is_name(value, name_auto)) {
      return false;
    }
  }
  return found.x != nullptr;
}

// An array that the core can take as it is.
const ArrayStruct* plain_array(PyObject* object, int flags) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != array_type) return nullptr;
  const auto* array = py::detail::array_proxy(object);
  return (array->flags & flags) == flags && array->nd <= CallRecord::kMaxDims ? array : nullptr;
}

bool same_shape(const ArrayStruct& a, const Py_intptr_t* shape, int dims) {
  return a.nd == dims && std::equal(a.dimensions, a.dimensions + dims, shape);
}

const Known* find(State& state, const ArrayStruct& x, PyObject* op) {
  auto fits = [&](const Known& known) {
    return known.descr.ptr() == x.descr && known.op.ptr() == op &&
           same_shape(x, known.shape.data(), known.dims);
  };
  if (fits(state.known[state.last])) return &state.known[state.last];
  for (std::size_t i = 0; i < state.known.size(); ++i) {
    if (!fits(state.known[i])) continue;
    state.last = i;
    return &state.known[i];
  }
  return nullptr;
}

// nullptr where there is no such reduction: the general method says why.
const Known* learn(State& state, const ArrayStruct& x, PyObject* op) {
  if (!PyUnicode_CheckExact(op)) return nullptr;
  auto dtype = py::reinterpret_borrow<py::dtype>(x.descr);
  Array array;
  try {
    auto [type, which] = reduction_of(dtype, py::cast<std::string>(py::handle(op)));
    array.item = item_size(type);
    array.type = to_string(type);
    array.count = 1;
    array.shape.assign(x.dimensions, x.dimensions + x.nd);
    for (std::int64_t items : array.shape) array.count *= static_cast<std::size_t>(items);
    if (array.count == 0) return nullptr;
    Known& known = state.known[state.oldest];
    known.dims = -1;
    known.prepared = state.communicator->prepare(array, {type, which});
    const Algorithm& selected =
        state.communicator->select(Collective::all_reduce, array.count * array.item);
    known.automatic = &selected == &direct_all_reduce();
    known.descr = dtype;
    known.op = py::reinterpret_borrow<py::object>(op);
    std::copy_n(x.dimensions, x.nd, known.shape.begin());
    known.dims = x.nd;
    state.last = state.oldest;
    state.oldest = (state.oldest + 1) % state.known.size();
    return &known;
  } catch (const std::exception&) {
    return nullptr;
  }
}

bool overlap(const ArrayStruct& a, const ArrayStruct& b, std::size_t bytes) {
  return a.data < b.data + bytes && b.data < a.data + bytes;
}

// The array with the result; nullptr with a Python error; Py_None (borrowed) where the call is none
// for the short way.
PyObject* all_reduce(PyObject* self, State& state, const Arguments& arguments) {
  constexpr int kReadable = npy_api::NPY_ARRAY_C_CONTIGUOUS_ | npy_api::NPY_ARRAY_ALIGNED_;
  const ArrayStruct* x = plain_array(arguments.x, kReadable);
  Communicator& communicator = *state.communicator;
  if (!x || communicator.has_calls_under_way()) return Py_None;  // which must be over first
  const Known* known = find(state, *x, arguments.op);
  if (!known) known = learn(state, *x, arguments.op);
  if (!known || (arguments.automatic && !known->automatic)) return Py_None;
  const PreparedAllReduce& prepared = known->prepared;
  std::size_t bytes = prepared.data.count * prepared.data.item;

  py::object result;
  if (arguments.out) {
    const ArrayStruct* out = plain_array(arguments.out, kReadable | npy_api::NPY_ARRAY_WRITEABLE_);
    if (!out || out->descr != x->descr || !same_shape(*out, x->dimensions, x->nd) ||
        (out->data != x->data && overlap(*out, *x, bytes))) {
      return Py_None;
    }
    result = py::reinterpret_borrow<py::object>(arguments.out);
  } else {
    Py_INCREF(x->descr);
    auto& api = npy_api::get();
    result = py::reinterpret_steal<py::object>(api.PyArray_NewFromDescr_(
        api.PyArray_Type_, x->descr, x->nd, x->dimensions, nullptr, nullptr, 0, nullptr));
    if (!result) return nullptr;
  }
  void* output = py::detail::array_proxy(result.ptr())->data;
  // While the interpreter is kept, peers that are threads cannot come.
  if (!state.threads) state.looks = communicator.group().in_crowd() ? kCrowdedSpins : kHeldLooks;
  bool brief = bytes <= (state.threads ? kOneShotBytes : kHeldBytes);
  try {
    if (!brief || !communicator.begin(prepared, x->data, output, state.looks)) {
      std::shared_ptr<Communicator> kept = state.communicator;
      PreparedAllReduce copy = prepared;  // another thread may use the place
      Waiting waiting = waiting_for(reinterpret_cast<Base*>(self)->timeout);
      InterpreterRelease release;
      if (brief || !kept->begin(copy, x->data, output, 1)) kept->finish(copy, waiting);
    }
  } catch (...) {
    set_python_error();
    return nullptr;
  }
  return result.release().ptr();
}

PyObject* call_method(PyObject* callable, PyObject* const* args, std::size_t nargsf,
                      PyObject* names) {
  auto* method = reinterpret_cast<Method*>(callable);
  auto positional = static_cast<std::size_t>(PyVectorcall_NARGS(nargsf));
  if (positional > 0 && PyObject_TypeCheck(args[0], base_type)) {
    State* state = reinterpret_cast<Base*>(args[0])->state;
    Arguments arguments;
    if (state && parse(args + 1, positional - 1, names, arguments)) {
      PyObject* result = all_reduce(args[0], *state, arguments);
      if (result != Py_None) return result;
    }
  }
  return PyObject_Vectorcall(method->general, args, nargsf, names);
}

// The method's type.

PyObject* new_method(PyObject*, PyObject* general) {
  auto* method = PyObject_GC_New(Method, method_type);
  if (!method) return nullptr;
  method->call = call_method;
  method->general = Py_NewRef(general);
  PyObject_GC_Track(method);
  return reinterpret_cast<PyObject*>(method);
}

int traverse_method(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(reinterpret_cast<Method*>(self)->general);
  return 0;
}

int clear_method(PyObject* self) {
  Py_CLEAR(reinterpret_cast<Method*>(self)->general);
  return 0;
}

void free_method(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear_method(self);
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

PyObject* bind_method(PyObject* self, PyObject* object, PyObject*) {
  return object && object != Py_None ? PyMethod_New(self, object) : Py_NewRef(self);
}

// Name, documentation and signature are those of the method in Python.
PyObject* method_attribute(PyObject* self, PyObject* name) {
  PyObject* general = reinterpret_cast<Method*>(self)->general;
  if (PyUnicode_CompareWithASCIIString(name, "__wrapped__") == 0) return Py_NewRef(general);
  if (PyUnicode_CompareWithASCIIString(name, "__class__") == 0) {
    return PyObject_GenericGetAttr(self, name);
  }
  return PyObject_GetAttr(general, name);
}

// Python's help looks for the documentation past method_attribute().
PyObject* method_documentation(PyObject* self, void*) {
  return PyObject_GetAttrString(reinterpret_cast<Method*>(self)->general, "__doc__");
}

PyTypeObject* make_method_type() {
  static PyGetSetDef properties[] = {{"__doc__", method_documentation, nullptr, nullptr, nullptr},
                                     {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Method, call), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_descr_get, reinterpret_cast<void*>(bind_method)},
                                {Py_tp_getattro, reinterpret_cast<void*>(method_attribute)},
                                {Py_tp_traverse, reinterpret_cast<void*>(traverse_method)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear_method)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(free_method)},
                                {Py_tp_members, members},
                                {Py_tp_getset, properties},
                                {0, nullptr}};
  static PyType_Spec spec = {"pycollective._core.FastMethod", sizeof(Method), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                                 Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                             slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

// The base's type.

PyObject* attach(PyObject* self, PyObject* core) {
  auto* base = reinterpret_cast<Base*>(self);
  try {
    auto communicator = py::cast<std::shared_ptr<Communicator>>(py::handle(core));
    auto state = std::make_unique<State>();
    state->threads = communicator->group().transport() == "threads";
    // Without a board there is no short way.
    bool direct = communicator->has_board();
    state->communicator = std::move(communicator);
    delete std::exchange(base->state, direct ? state.release() : nullptr);
  } catch (...) {
    set_python_error();
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* detach(PyObject* self, PyObject*) {
  delete std::exchange(reinterpret_cast<Base*>(self)->state, nullptr);
  Py_RETURN_NONE;
}

PyObject* get_timeout(PyObject* self, void*) {
  return PyFloat_FromDouble(reinterpret_cast<Base*>(self)->timeout);
}

// Refuses wrong values here: an error in the middle of a call would leave the peers waiting.
int set_timeout(PyObject* self, PyObject* value, void*) {
  double seconds = value ? PyFloat_AsDouble(value) : -1;
  bool is_number = !PyErr_Occurred();
  if (is_number && seconds > 0) {
    reinterpret_cast<Base*>(self)->timeout = seconds;
    return 0;
  }
  PyErr_Clear();
  PyErr_Format(is_number ? PyExc_ValueError : PyExc_TypeError,
               "timeout must be a positive number of seconds, not %R", value ? value : Py_None);
  return -1;
}

void free_base(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Base*>(self)->state;
  type->tp_free(self);
  Py_DECREF(type);
}

PyTypeObject* make_base_type() {
  static PyMethodDef methods[] = {
      {"_attach", attach, METH_O, "_attach($self, core, /)\n--\n\nGo the short way to this core."},
      {"_detach", detach, METH_NOARGS, "_detach($self, /)\n--\n\nGo it no more."},
      {nullptr, nullptr, 0, nullptr}};
  static PyGetSetDef properties[] = {
      {"timeout", get_timeout, set_timeout,
       "Seconds that a call waits for the other ranks, unless the call says otherwise.", nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_getset, properties},
      {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
      {Py_tp_dealloc, reinterpret_cast<void*>(free_base)},
      {Py_tp_methods, methods},
      {Py_tp_doc, const_cast<char*>("What a communicator inherits: its end of the core.")},
      {0, nullptr}};
  static PyType_Spec spec = {"pycollective._core.CommunicatorBase", sizeof(Base), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

}  // namespace

void bind_fast_all_reduce(py::module_& m) {
  auto intern = [](const char* text) { return PyUnicode_InternFromString(text); };
  name_x = intern("x"), name_op = intern("op"), name_out = intern("out");
  name_algorithm = intern("algorithm"), name_sum = intern("sum");
  name_auto = intern("auto"), name_direct = intern("direct");
  array_type = reinterpret_cast<PyObject*>(npy_api::get().PyArray_Type_);
  base_type = make_base_type();
  method_type = make_method_type();
  if (!base_type || !method_type) throw py::error_already_set();
  m.attr("CommunicatorBase") =
      py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(base_type));
  static PyMethodDef make = {
      "fast_all_reduce", new_method, METH_O,
      "fast_all_reduce(method, /)\n--\n\nCommunicator.all_reduce with a short way to the core."};
  m.attr("fast_all_reduce") = py::reinterpret_steal<py::object>(
      PyCFunction_NewEx(&make, nullptr, py::str("pycollective._core").ptr()));
}

}  // namespace pycollective
