// The fast path of collective calls from Python to the core's direct path.
//
// A call of some hundred nanoseconds has no time for pybind11's conversions or for Python
// statements. `fast_call(collective)(method)` makes a method that reads the arguments itself. Plain
// NumPy arrays that need no preparation go to the core at once; all other calls go to the general
// method in Python. Calls that a program repeats (the same shape, dtype, op and root) are cached.
#include "bindings/fast_calls.h"

#include <pybind11/numpy.h>
#include <structmember.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/dtypes.h"
#include "bindings/errors.h"
#include "executor/communicator.h"
#include "support/interpreter_release.h"
#include "support/tuning.h"
#include "support/waiter.h"

namespace py = pybind11;

namespace pycollective {
namespace {

using py::detail::npy_api;

using P = Parameter;

// out, algorithm and async_op are keyword-only.
constexpr Kind kKinds[] = {
    {Collective::all_reduce, {{P::x, P::op, P::out, P::algorithm, P::async_op}, 2}},
    {Collective::reduce, {{P::x, P::op, P::root, P::out, P::algorithm, P::async_op}, 3}},
    {Collective::reduce_scatter, {{P::x, P::op, P::out, P::algorithm, P::async_op}, 2}},
    {Collective::broadcast, {{P::x, P::root, P::out, P::algorithm, P::async_op}, 2}},
    {Collective::scatter, {{P::x, P::root, P::out, P::algorithm, P::async_op}, 2}},
    {Collective::gather, {{P::x, P::root, P::out, P::algorithm, P::async_op}, 2}},
    {Collective::all_gather, {{P::x, P::out, P::algorithm, P::async_op}, 1}},
    {Collective::all_to_all,
     {{P::x, P::counts, P::out_counts, P::out, P::algorithm, P::async_op}, 2}},
    {Collective::barrier, {{P::async_op}, 0}},
};

struct Other {
  const char* name;
  FastPath fast_path;
  Signature signature;
};
constexpr Other kOthers[] = {
    {"fast_send", send_message, {{P::x, P::dest, P::tag, P::async_op}, 3}},
    {"fast_recv", receive_message, {{P::out, P::source, P::tag, P::async_op}, 3}},
    {"fast_reduce_many", reduce_many, {{P::arrays, P::op, P::out}, 2}}};

struct Method {
  PyObject_HEAD vectorcallfunc call;
  PyObject* general;
  FastPath fast_path;
  const Signature* signature;
  const Kind* kind;  // nullptr: not a collective
};

PyTypeObject* base_type = nullptr;
PyTypeObject* method_type = nullptr;
PyObject* array_type = nullptr;
std::array<PyObject*, kParameters> parameter_names;
PyObject *name_sum, *name_auto, *name_direct, *name_result, *name_tasks;
PyTypeObject* work_type = nullptr;  // Python's class Work

bool is_name(PyObject* object, PyObject* name) {
  return object == name || (PyUnicode_CheckExact(object) && PyUnicode_Compare(object, name) == 0);
}

// Reads count number `rank` of a list or tuple with a count for each rank. Raises nothing.
bool read_count(PyObject* counts, int rank, int size, int& found) {
  if (!counts || !(PyList_CheckExact(counts) || PyTuple_CheckExact(counts))) return false;
  return PySequence_Fast_GET_SIZE(counts) == size &&
         read_number(PySequence_Fast_ITEMS(counts)[rank], INT_MAX, found);
}

bool has_equal_counts(PyObject* counts, int size, Py_intptr_t expected) {
  for (int r = 0, count = 0; r < size; ++r) {
    if (!read_count(counts, r, size, count) || count != expected) return false;
  }
  return true;
}

// Returns the items for each rank, and adds their rows to `rows`. Returns nothing if the fast path
// does not support the counts.
std::vector<std::size_t> items_of(PyObject* counts, int size, std::size_t items_of_a_row,
                                  Py_intptr_t& rows) {
  std::vector<std::size_t> items;
  for (int r = 0, count = 0; r < size; ++r) {
    if (!read_count(counts, r, size, count)) return {};
    items.push_back(static_cast<std::size_t>(count) * items_of_a_row);
    rows += count;
  }
  return items;
}

// The arguments of a collective.
struct Request {
  PyObject *x = nullptr, *out = nullptr, *op = nullptr;
  PyObject *counts = nullptr, *out_counts = nullptr;
  int root = 0;
  bool automatic = true;  // "auto", not "direct"
  bool later = false;     // async_op

  // Returns false if the fast path does not support the call. Raises nothing.
  bool read(const Arguments& given, int size) {
    x = given.unless_none(P::x);
    out = given.unless_none(P::out);
    counts = given.unless_none(P::counts);
    out_counts = given.unless_none(P::out_counts);
    op = given[P::op] ? given[P::op] : name_sum;
    if (given[P::root] && !read_number(given[P::root], size - 1, root)) return false;
    if (PyObject* name = given[P::algorithm]) {
      automatic = !is_name(name, name_direct);
      if (automatic && !is_name(name, name_auto)) return false;
    }
    return read_async_op(given, later);
  }
};

bool same_shape(const ArrayStruct& array, Lengths shape) {
  return std::ranges::equal(lengths_of(array), shape);
}

// Returns nullptr if the fast path does not support the call; the general method then executes it
// or raises. Throws Python's errors.
const RepeatedCall* learn(RepeatedCalls& repeated, const CallKey& key, PyObject* descr,
                          PyObject* op) {
  try {
    Reducing reducing;
    const auto elements = elements_of(descr, reduces(key.collective) ? op : nullptr, reducing);
    return elements ? repeated.add(key, *elements, kept(descr, op)) : nullptr;
  } catch (const py::error_already_set&) {
    throw;  // e.g. Ctrl-C, because NumPy names a dtype in Python
  } catch (const std::exception&) {
    return nullptr;
  }
}

// Makes a call that is prepared without arrays. `given` keeps the input alive. Returns the result,
// or its Work if the call is asynchronous.
PyObject* make_prepared(Base& self, const PreparedCall& prepared, bool later, PyObject* given,
                        const void* input, py::object result, void* output, std::size_t bytes) {
  if (!later) {
    const auto input_kept = py::reinterpret_borrow<py::object>(given);
    run_prepared(self, prepared, input, output, bytes);
    return result.release().ptr();
  }
  Communicator& communicator = *self.state->communicator;
  communicator.start_tasks();  // may throw: the call has not begun, so it can be repeated
  const auto task =
      communicator.submit_at_once(prepared, input, output, bytes, duration_of(self.timeout),
                                  [&] { return kept(given, result.ptr()); });
  // Without this, the arrays of such a call would stay until the next call: its Work has no task.
  if (task && task->succeeded()) communicator.collect();
  return new_work(task, result.ptr());
}

// Makes an all_to_all with lengths for each pair of ranks. Calls of this kind rarely repeat their
// lengths, so none is kept. Returns as make_call().
PyObject* make_call_of_counts(Base& self, const Request& request, const ArrayStruct& x) {
  const State& state = *self.state;
  Communicator& communicator = *state.communicator;
  const int size = communicator.size();
  const auto own = static_cast<std::size_t>(communicator.rank());
  if (x.nd == 0) return Py_NotImplemented;
  std::array<Py_intptr_t, CallRecord::kMaxDims> shape;
  std::copy(x.dimensions, x.dimensions + x.nd, shape.begin());
  std::size_t row = 1;
  for (int d = 1; d < x.nd; ++d) row *= static_cast<std::size_t>(shape[d]);
  Py_intptr_t sent_rows = 0, received_rows = 0;
  const auto sent = items_of(request.counts, size, row, sent_rows);
  const auto received = items_of(request.out_counts, size, row, received_rows);
  if (sent.empty() || received.empty() || sent_rows != shape[0] || sent[own] != received[own]) {
    return Py_NotImplemented;
  }
  Reducing none;
  const auto elements = elements_of(x.descr, nullptr, none);
  if (self.has_left(state) || !elements || elements->item == 0) return Py_NotImplemented;
  shape[0] = received_rows;
  const std::size_t in = static_cast<std::size_t>(sent_rows) * row * elements->item;
  const std::size_t out_bytes = static_cast<std::size_t>(received_rows) * row * elements->item;
  py::object result;
  if (request.out) {
    const ArrayStruct* out = plain_array(request.out, kReadable | npy_api::NPY_ARRAY_WRITEABLE_);
    if (!out || out->descr != x.descr ||
        !same_shape(*out, {shape.data(), static_cast<std::size_t>(x.nd)}) ||
        (x.data < out->data + out_bytes && out->data < x.data + in)) {
      return Py_NotImplemented;
    }
    result = py::reinterpret_borrow<py::object>(request.out);
  } else {
    result =
        new_array(communicator.group().arena(), x.descr, x.nd, shape.data(), kSharedResultFrom);
  }
  Array array;
  array.type = elements->type;
  array.item = elements->item;
  array.shape.assign(x.dimensions, x.dimensions + x.nd);
  array.shape[0] = -1;  // any length
  return make_prepared(self, communicator.prepare_all_to_all(array, sent, received), request.later,
                       request.x, x.data, result, py::detail::array_proxy(result.ptr())->data,
                       std::max(in, out_bytes));
}

// Returns the call's result, nullptr with a Python error, or Py_NotImplemented (borrowed) if the
// fast path does not support the call.
PyObject* make_call(Base& self, const Kind& kind, const Request& request) {
  State& state = *self.state;
  Communicator& communicator = *state.communicator;
  const PreparedCall* prepared = &state.barrier;
  const void* input = nullptr;
  void* output = nullptr;
  std::size_t bytes = 0;
  py::object result = py::none();
  PyObject* given = nullptr;
  if (kind.collective != Collective::barrier) {
    // In a broadcast and a scatter, ranks other than the root have no input: x or the output gives
    // the shape and the dtype.
    const bool scatters = kind.collective == Collective::scatter;
    const bool is_input = communicator.rank() == request.root ||
                          !(scatters || kind.collective == Collective::broadcast);
    given = is_input || request.x ? request.x : request.out;
    const ArrayStruct* x = given ? plain_array(given, kReadable) : nullptr;
    if (!x) return Py_NotImplemented;
    Lengths shape = lengths_of(*x);
    std::array<Py_intptr_t, CallRecord::kMaxDims> part;
    if (scatters && !is_input && request.x) {
      if (shape.empty() || shape[0] % communicator.size() != 0) return Py_NotImplemented;
      std::ranges::copy(shape, part.begin());
      part[0] /= communicator.size();
      shape = {part.data(), shape.size()};
    }
    CallKey key{kind.collective, {x->descr, request.op}, request.root, shape};
    if (request.counts || request.out_counts) {
      const int size = communicator.size();
      if (shape.empty() || shape[0] % size != 0 ||
          !has_equal_counts(request.counts, size, shape[0] / size) ||
          !has_equal_counts(request.out_counts, size, shape[0] / size)) {
        return make_call_of_counts(self, request, *x);
      }
      key.parts = Parts::own_equal;
    }
    const RepeatedCall* known = state.repeated.find(key);
    if (!known) known = learn(state.repeated, key, x->descr, request.op);
    if (self.has_left(state) || !known || !(request.automatic ? known->automatic : known->direct)) {
      return Py_NotImplemented;
    }
    bytes = known->bytes();
    prepared = &known->prepared;
    if (is_input) input = x->data;
    if (known->outputs == 0) {
      // Ranks other than the root have no result.
    } else if (request.out) {
      const ArrayStruct* out = plain_array(request.out, kReadable | npy_api::NPY_ARRAY_WRITEABLE_);
      if (!out || out->descr != x->descr || !same_shape(*out, known->result()) ||
          (input && known->overlap(communicator.rank(), x->data, out->data))) {
        return Py_NotImplemented;
      }
      result = py::reinterpret_borrow<py::object>(request.out);
    } else {
      result = new_array(communicator.group().arena(), x->descr, known->result_dims,
                         known->result_shape.data(), kSharedResultFrom);
    }
    if (known->outputs) output = py::detail::array_proxy(result.ptr())->data;
  }
  return make_prepared(self, *prepared, request.later, given, input, result, output, bytes);
}

PyObject* call_collective(Base& self, const Kind* kind, const Arguments& arguments) {
  Request request;
  if (!request.read(arguments, self.state->communicator->size())) return Py_NotImplemented;
  return make_call(self, *kind, request);
}

// PyObject_TypeCheck() compares all bases of the class with base_type. The last class that passed
// is kept, so that calls of one class need one comparison.
bool is_communicator(PyObject* object) {
  static PyTypeObject* last = nullptr;
  if (Py_TYPE(object) == last) return true;
  if (!PyObject_TypeCheck(object, base_type)) return false;
  Py_XDECREF(std::exchange(last, Py_TYPE(object)));
  Py_INCREF(last);
  return true;
}

PyObject* call_method(PyObject* callable, PyObject* const* args, std::size_t nargsf,
                      PyObject* names) {
  auto* method = reinterpret_cast<Method*>(callable);
  auto positional = static_cast<std::size_t>(PyVectorcall_NARGS(nargsf));
  if (positional > 0 && is_communicator(args[0])) {
    Base& self = *reinterpret_cast<Base*>(args[0]);
    Arguments arguments;
    if (self.state && arguments.assign(*method->signature, args + 1, positional - 1, names)) {
      const Use use(*self.state);
      try {
        PyObject* result = method->fast_path(self, method->kind, arguments);
        if (result != Py_NotImplemented) return result;
      } catch (...) {
        set_python_error();
        return nullptr;
      }
    }
  }
  return PyObject_Vectorcall(method->general, args, nargsf, names);
}

PyObject* new_method(FastPath fast_path, const Signature& signature, const Kind* kind,
                     PyObject* general) {
  auto* method = PyObject_GC_New(Method, method_type);
  if (!method) return nullptr;
  method->call = call_method;
  method->general = Py_NewRef(general);
  method->fast_path = fast_path;
  method->signature = &signature;
  method->kind = kind;
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

// Name, documentation and signature are those of the general method.
PyObject* method_attribute(PyObject* self, PyObject* name) {
  PyObject* general = reinterpret_cast<Method*>(self)->general;
  if (PyUnicode_CompareWithASCIIString(name, "__wrapped__") == 0) return Py_NewRef(general);
  if (PyUnicode_CompareWithASCIIString(name, "__class__") == 0) {
    return PyObject_GenericGetAttr(self, name);
  }
  return PyObject_GetAttr(general, name);
}

// help() does not use method_attribute() for the documentation.
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

void replace_state(Base& self, State* state) {
  State* before = std::exchange(self.state, state);
  if (before && before->uses > 0) {
    before->detached = true;
  } else {
    delete before;
  }
}

PyObject* attach(PyObject* self, PyObject* core) {
  try {
    auto communicator = py::cast<std::shared_ptr<Communicator>>(py::handle(core));
    auto state = std::make_unique<State>(std::move(communicator));
    replace_state(*reinterpret_cast<Base*>(self), state.release());
  } catch (...) {
    set_python_error();
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* detach(PyObject* self, PyObject*) {
  replace_state(*reinterpret_cast<Base*>(self), nullptr);
  Py_RETURN_NONE;
}

PyObject* set_place(PyObject* self, PyObject* place) {
  auto& base = *reinterpret_cast<Base*>(self);
  if (!PyArg_ParseTuple(place, "ii", &base.rank, &base.size)) return nullptr;
  Py_RETURN_NONE;
}

PyObject* get_timeout(PyObject* self, void*) {
  return PyFloat_FromDouble(reinterpret_cast<Base*>(self)->timeout);
}

// Rejects wrong values at once: an error within a call would leave the peers waiting.
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
  replace_state(*reinterpret_cast<Base*>(self), nullptr);
  type->tp_free(self);
  Py_DECREF(type);
}

PyTypeObject* make_base_type() {
  static PyMethodDef methods[] = {
      {"_attach", attach, METH_O, "_attach($self, core, /)\n--\n\nUse the fast path to this core."},
      {"_set_place", set_place, METH_VARARGS,
       "_set_place($self, rank, size, /)\n--\n\nSet the rank and the number of ranks."},
      {"_detach", detach, METH_NOARGS, "_detach($self, /)\n--\n\nStop using the fast path."},
      {nullptr, nullptr, 0, nullptr}};
  static PyGetSetDef properties[] = {
      {"timeout", get_timeout, set_timeout, "Default timeout of calls, in seconds.", nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyMemberDef members[] = {
      {"rank", T_INT, offsetof(Base, rank), READONLY,
       "The number of this rank in the group, from 0."},
      {"size", T_INT, offsetof(Base, size), READONLY, "The number of ranks in the group."},
      {nullptr, 0, 0, 0, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_members, members},
      {Py_tp_getset, properties},
      {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
      {Py_tp_dealloc, reinterpret_cast<void*>(free_base)},
      {Py_tp_methods, methods},
      {Py_tp_doc,
       const_cast<char*>("The base class of Communicator, with the fast path to the core.")},
      {0, nullptr}};
  static PyType_Spec spec = {"pycollective._core.CommunicatorBase", sizeof(Base), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

}  // namespace

bool Arguments::assign(const Signature& signature, PyObject* const* args, std::size_t positional,
                       PyObject* names) {
  if (positional > signature.positional) return false;
  const auto& parameters = signature.parameters;
  for (std::size_t i = 0; i < positional; ++i) {
    values_[static_cast<std::size_t>(parameters[i])] = args[i];
  }
  const Py_ssize_t count = names ? PyTuple_GET_SIZE(names) : 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* name = PyTuple_GET_ITEM(names, i);
    auto has_name = [name](Parameter parameter) {
      return name == parameter_names[static_cast<std::size_t>(parameter)];
    };
    auto found = std::find_if(parameters.begin() + static_cast<std::ptrdiff_t>(positional),
                              parameters.end(), has_name);
    if (found == parameters.end()) return false;
    values_[static_cast<std::size_t>(*found)] = args[positional + static_cast<std::size_t>(i)];
  }
  return true;
}

bool read_number(PyObject* value, int most, int& found) {
  if (!PyLong_CheckExact(value)) return false;
  int overflow = 0;
  const long number = PyLong_AsLongAndOverflow(value, &overflow);
  if (overflow || number < 0 || number > most) return false;
  found = static_cast<int>(number);
  return true;
}

bool read_async_op(const Arguments& arguments, bool& found) {
  PyObject* value = arguments[P::async_op];
  if (value && !PyBool_Check(value)) return false;
  found = value == Py_True;
  return true;
}

PyObject* default_op() { return name_sum; }

const ArrayStruct* plain_array(PyObject* object, int flags) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != array_type) return nullptr;
  const auto* array = py::detail::array_proxy(object);
  return (array->flags & flags) == flags && array->nd <= CallRecord::kMaxDims ? array : nullptr;
}

std::optional<Elements> elements_of(PyObject* descr, PyObject* op, Reducing& reducing) {
  constexpr std::uint64_t kHasObject = 1;  // NPY_ITEM_REFCOUNT
  auto dtype = py::reinterpret_borrow<py::dtype>(descr);
  if (static_cast<std::uint64_t>(dtype.flags()) & kHasObject) return {};
  const auto item = static_cast<std::size_t>(dtype.itemsize());
  if (!op) return Elements{name_of(dtype), item};
  if (!PyUnicode_CheckExact(op)) return {};
  auto [type, operation] = reduction_of(dtype, py::cast<std::string>(py::handle(op)));
  reducing = {type, operation};
  return Elements{std::string(to_string(type)), item, &reducing};
}

std::shared_ptr<void> kept(PyObject* first, PyObject* second) {
  using Objects = std::pair<py::object, py::object>;
  return std::make_shared<Objects>(py::reinterpret_borrow<py::object>(first),
                                   py::reinterpret_borrow<py::object>(second));
}

void run_prepared(Base& self, const PreparedCall& prepared, const void* input, void* output,
                  std::size_t bytes) {
  Communicator& core = *self.state->communicator;
  const int polls = core.has_calls_under_way() ? 0 : core.held_polls(bytes);
  if (polls > 0 && core.begin(prepared, input, output, polls)) return;
  // While the GIL is released, another thread may close the communicator or replace the cache
  // entry.
  const std::shared_ptr<Communicator> communicator = self.state->communicator;
  const PreparedCall copy = prepared;
  const double timeout = self.timeout;
  InterpreterRelease release;
  if (polls == 0) communicator->wait_for_tasks(check_signals);
  const Waiting waiting = waiting_for(timeout);
  if (polls > 0 || !communicator->begin(copy, input, output, 1))
    communicator->finish(copy, waiting);
}

PyObject* new_work(const std::shared_ptr<Task>& task, PyObject* result) {
  auto work = py::reinterpret_steal<py::object>(work_type->tp_alloc(work_type, 0));
  if (!work || PyObject_SetAttr(work.ptr(), name_result, result) != 0) return nullptr;
  if (task && !task->succeeded()) {
    const py::object tasks = py::make_tuple(task);
    if (PyObject_SetAttr(work.ptr(), name_tasks, tasks.ptr()) != 0) return nullptr;
  }
  return work.release().ptr();
}

void bind_fast_calls(py::module_& m) {
  auto intern = [](const char* text) { return text ? PyUnicode_InternFromString(text) : nullptr; };
  constexpr std::array<const char*, kParameters> kNames = {
      nullptr,    "x",    "arrays", "op",  "root",   "out",       "algorithm",
      "async_op", "dest", "source", "tag", "counts", "out_counts"};
  std::transform(kNames.begin(), kNames.end(), parameter_names.begin(), intern);
  name_sum = intern("sum"), name_auto = intern("auto"), name_direct = intern("direct");
  name_result = intern("_result"), name_tasks = intern("_tasks");
  array_type = reinterpret_cast<PyObject*>(npy_api::get().PyArray_Type_);
  base_type = make_base_type();
  method_type = make_method_type();
  if (!base_type || !method_type) throw py::error_already_set();
  m.attr("CommunicatorBase") =
      py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(base_type));
  m.def(
      "fast_call",
      [](Collective collective) {
        for (const Kind& kind : kKinds) {
          if (kind.collective != collective) continue;
          return py::cpp_function([&kind](const py::object& method) {
            return py::reinterpret_steal<py::object>(
                new_method(call_collective, kind.signature, &kind, method.ptr()));
          });
        }
        throw std::invalid_argument("this collective has no fast path");
      },
      py::arg("collective"),
      "Return a decorator that gives a communicator's method a fast path to the core.");
  for (const Other& other : kOthers) {
    m.def(
        other.name,
        [&other](const py::object& method) {
          return py::reinterpret_steal<py::object>(
              new_method(other.fast_path, other.signature, nullptr, method.ptr()));
        },
        py::arg("method"), "Give this method a fast path to the core.");
  }
  m.def(
      "use_work",
      [](const py::type& type) {
        work_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(type.ptr()));
      },
      py::arg("type"),
      "Set the class of asynchronous handles. They get `_result`, and `_tasks` while running.");
}

}  // namespace pycollective
