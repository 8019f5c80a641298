// The short way of a communicator's collective calls from Python to the direct path.
//
// A call of some hundred nanoseconds has no time for pybind11's conversions, nor for Python's own
// statements. `fast_call(collective)(method)` makes a method that looks at the arguments itself:
// plain NumPy arrays that need no preparation go to the core at once; all else goes to the method
// in Python, which is right for everything. What a program repeats (shape, dtype, op, root) is kept
// prepared.
#include "bindings/fast_calls.h"

#include <pybind11/numpy.h>
#include <structmember.h>

#include <algorithm>
#include <array>
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
#include "executor/call_shape.h"
#include "executor/communicator.h"
#include "support/interpreter_release.h"
#include "support/tuning.h"
#include "support/waiter.h"

namespace py = pybind11;

namespace pycollective {
namespace {

using py::detail::npy_api;

using P = Parameter;

// The parameters by keyword alone are out, algorithm and async_op.
constexpr Kind kKinds[] = {
    {Collective::all_reduce, {{P::x, P::op, P::out, P::algorithm, P::async_op}, 2}, true},
    {Collective::reduce, {{P::x, P::op, P::root, P::out, P::algorithm, P::async_op}, 3}, true},
    {Collective::reduce_scatter, {{P::x, P::op, P::out, P::algorithm, P::async_op}, 2}, true},
    {Collective::broadcast, {{P::x, P::root, P::out, P::algorithm, P::async_op}, 2}, true},
    {Collective::scatter, {{P::x, P::root, P::out, P::algorithm, P::async_op}, 2}, true},
    {Collective::gather, {{P::x, P::root, P::out, P::algorithm, P::async_op}, 2}, true},
    {Collective::all_gather, {{P::x, P::out, P::algorithm, P::async_op}, 1}, true},
    {Collective::all_to_all, {{P::x, P::out, P::algorithm, P::async_op}, 1}, false},
    {Collective::barrier, {{P::async_op}, 0}, false},
};

struct Other {
  const char* name;
  ShortWay short_way;
  Signature signature;
};
constexpr Other kOthers[] = {{"fast_send", send_message, {{P::x, P::dest, P::tag}, 3}},
                             {"fast_recv", receive_message, {{P::out, P::source, P::tag}, 3}},
                             {"fast_reduce_many", reduce_many, {{P::arrays, P::op, P::out}, 2}}};

struct Method {
  PyObject_HEAD vectorcallfunc call;
  PyObject* general;
  ShortWay short_way;
  const Signature* signature;
  const Kind* kind;  // nullptr: no collective
};

PyTypeObject* base_type = nullptr;
PyTypeObject* method_type = nullptr;
PyObject* array_type = nullptr;
std::array<PyObject*, kParameters> parameter_names;
PyObject *name_sum, *name_auto, *name_direct, *name_result, *name_tasks;
PyTypeObject* work_type = nullptr;  // Work, in Python

bool is_name(PyObject* object, PyObject* name) {
  return object == name || (PyUnicode_CheckExact(object) && PyUnicode_Compare(object, name) == 0);
}

// The arguments of a collective.
struct Request {
  PyObject *x = nullptr, *out = nullptr, *op = nullptr;
  int root = 0;
  bool automatic = true;  // "auto", not "direct"
  bool later = false;     // async_op

  // Returns false if the call is none for the short way. Raises nothing.
  bool read(const Arguments& given, int size) {
    x = given.unless_none(P::x);
    out = given.unless_none(P::out);
    op = given[P::op] ? given[P::op] : name_sum;
    if (given[P::root] && !read_number(given[P::root], size - 1, root)) return false;
    if (PyObject* name = given[P::algorithm]) {
      automatic = !is_name(name, name_direct);
      if (automatic && !is_name(name, name_auto)) return false;
    }
    if (PyObject* value = given[P::async_op]) {
      if (!PyBool_Check(value)) return false;
      later = value == Py_True;
    }
    return true;
  }
};

bool same_shape(const ArrayStruct& a, const Py_intptr_t* shape, int dims) {
  return a.nd == dims && std::equal(a.dimensions, a.dimensions + dims, shape);
}

bool fits(const Known& known, const Kind& kind, const Request& request, const ArrayStruct& x) {
  return known.kind == &kind && known.descr.ptr() == x.descr && known.op.ptr() == request.op &&
         known.root == request.root && same_shape(x, known.shape.data(), known.dims);
}

const Known* find(State& state, const Kind& kind, const Request& request, const ArrayStruct& x) {
  if (fits(state.known[state.last], kind, request, x)) return &state.known[state.last];
  for (std::size_t i = 0; i < state.known.size(); ++i) {
    if (!fits(state.known[i], kind, request, x)) continue;
    state.last = i;
    return &state.known[i];
  }
  return nullptr;
}

// nullptr where the call is none for the short way: the general method does it, or says why not.
// Throws what Python raises. `x` is the input; on a scatter's other ranks, the output.
const Known* learn(State& state, const Kind& kind, const Request& request, const ArrayStruct& x) {
  constexpr std::uint64_t kHasObject = 1;  // NPY_ITEM_REFCOUNT
  Communicator& communicator = *state.communicator;
  const int size = communicator.size();
  auto dtype = py::reinterpret_borrow<py::dtype>(x.descr);
  Array array;
  try {
    if (static_cast<std::uint64_t>(dtype.flags()) & kHasObject) return nullptr;
    std::optional<Reducing> reducing;
    array.item = static_cast<std::size_t>(dtype.itemsize());
    if (reduces(kind.collective)) {
      if (!PyUnicode_CheckExact(request.op)) return nullptr;
      auto [type, which] = reduction_of(dtype, py::cast<std::string>(py::handle(request.op)));
      reducing = Reducing{type, which};
      array.type = to_string(type);
    } else {
      array.type = name_of(dtype);
    }
    const auto shape = call_shape(kind.collective, {x.dimensions, x.dimensions + x.nd},
                                  communicator.rank(), size, request.root);
    if (!shape || array.item == 0) return nullptr;
    array.shape = shape->agreed;
    array.count = shape->count;
    Known& known = state.known[state.oldest];
    known.kind = nullptr;
    const std::size_t bytes =
        array.count * array.item * (in_parts(kind.collective) ? static_cast<std::size_t>(size) : 1);
    const Algorithm& selected = communicator.select(kind.collective, bytes);
    const Algorithm& algorithm = state.board ? direct_algorithm(kind.collective) : selected;
    known.prepared =
        communicator.prepare(algorithm, array, request.root, reducing ? &*reducing : nullptr);
    known.direct = state.board;
    known.automatic = &selected == &algorithm;
    known.descr = dtype;
    known.op = py::reinterpret_borrow<py::object>(request.op);
    known.root = request.root;
    known.dims = x.nd;
    std::copy_n(x.dimensions, x.nd, known.shape.begin());
    known.inputs = shape->inputs;
    known.outputs = shape->outputs;
    known.item = array.item;
    known.output_dims = static_cast<int>(shape->result.size());
    std::copy(shape->result.begin(), shape->result.end(), known.output_shape.begin());
    known.kind = &kind;
    state.last = state.oldest;
    state.oldest = (state.oldest + 1) % state.known.size();
    return &known;
  } catch (const py::error_already_set&) {
    throw;  // Ctrl-C, for one: NumPy names a dtype in Python
  } catch (const std::exception&) {
    return nullptr;
  }
}

// Returns true if input and output overlap in another way than in place: as one array, or the
// smaller one as this rank's part of the larger.
bool overlap(const Known& known, int rank, const char* x, const char* out) {
  std::size_t in = known.inputs * known.item, bytes = known.outputs * known.item;
  if (x >= out + bytes || out >= x + in) return false;
  if (!known.kind->is_in_place) return true;
  const char* larger = in >= bytes ? x : out;
  const char* smaller = in >= bytes ? out : x;
  const std::size_t part = in == bytes ? 0 : std::min(in, bytes);
  return smaller != larger + static_cast<std::size_t>(rank) * part;
}

// Returns the Work of a call, which is over if there is no task.
PyObject* new_work(const std::shared_ptr<Task>& task, const py::object& result) {
  auto work = py::reinterpret_steal<py::object>(work_type->tp_alloc(work_type, 0));
  if (!work || PyObject_SetAttr(work.ptr(), name_result, result.ptr()) != 0) return nullptr;
  if (task) {
    const py::object tasks = py::make_tuple(task);
    if (PyObject_SetAttr(work.ptr(), name_tasks, tasks.ptr()) != 0) return nullptr;
  }
  return work.release().ptr();
}

// What the call returns; nullptr with a Python error; Py_NotImplemented (borrowed) where the call
// is none for the short way.
PyObject* make_call(Base& self, const Kind& kind, const Request& request) {
  constexpr int kReadable = npy_api::NPY_ARRAY_C_CONTIGUOUS_ | npy_api::NPY_ARRAY_ALIGNED_;
  State& state = *self.state;
  Communicator& communicator = *state.communicator;
  if (communicator.has_calls_under_way()) return Py_NotImplemented;  // which must be over first
  const PreparedCall* prepared = &state.barrier;
  const void* input = nullptr;
  void* output = nullptr;
  std::size_t bytes = 0;
  py::object kept, result = py::none();
  if (kind.collective != Collective::barrier) {
    // On a scatter's other ranks, the output says what there is; the input is not looked at.
    const bool by_output =
        kind.collective == Collective::scatter && !request.x && communicator.rank() != request.root;
    if (kind.collective == Collective::scatter && request.x &&
        communicator.rank() != request.root) {
      return Py_NotImplemented;
    }
    PyObject* given = by_output ? request.out : request.x;
    const ArrayStruct* x = given ? plain_array(given, kReadable) : nullptr;
    if (!x) return Py_NotImplemented;
    const Known* known = find(state, kind, request, *x);
    if (!known) known = learn(state, kind, request, *x);
    if (!known || !(request.automatic ? known->automatic : known->direct)) {
      return Py_NotImplemented;
    }
    bytes = known->bytes();
    prepared = &known->prepared;
    if (!by_output) input = x->data;
    if (known->outputs == 0) {
      // Another rank than the root gets nothing.
    } else if (request.out) {
      const ArrayStruct* out = plain_array(request.out, kReadable | npy_api::NPY_ARRAY_WRITEABLE_);
      if (!out || out->descr != x->descr ||
          !same_shape(*out, known->output_shape.data(), known->output_dims) ||
          (input && overlap(*known, communicator.rank(), x->data, out->data))) {
        return Py_NotImplemented;
      }
      result = py::reinterpret_borrow<py::object>(request.out);
    } else {
      result = new_array(communicator.group().arena(), x->descr, known->output_dims,
                         known->output_shape.data(), kSharedResultFrom);
    }
    if (known->outputs) output = py::detail::array_proxy(result.ptr())->data;
    kept = py::reinterpret_borrow<py::object>(given);
  }
  bool brief = bytes <= (state.threads ? kOneShotBytes : kHeldBytes);
  const double timeout = self.timeout;
  if (request.later) {
    if (!brief) return Py_NotImplemented;
    communicator.start_tasks();  // before anything is posted: the call can be repeated
    using Kept = std::pair<py::object, py::object>;
    auto under_way =
        communicator.submit_begun(*prepared, input, output, state.spins(), duration_of(timeout),
                                  [&] { return std::make_shared<Kept>(kept, result); });
    return new_work(under_way, result);
  }
  if (!brief || !communicator.begin(*prepared, input, output, state.spins())) {
    std::shared_ptr<Communicator> kept_communicator = state.communicator;
    PreparedCall copy = *prepared;  // another thread may use the place
    Waiting waiting = waiting_for(timeout);
    InterpreterRelease release;
    if (brief || !kept_communicator->begin(copy, input, output, 1)) {
      kept_communicator->finish(copy, waiting);
    }
  }
  return result.release().ptr();
}

PyObject* call_collective(Base& self, const Kind* kind, const Arguments& arguments) {
  Request request;
  if (!request.read(arguments, self.state->communicator->size())) return Py_NotImplemented;
  return make_call(self, *kind, request);
}

PyObject* call_method(PyObject* callable, PyObject* const* args, std::size_t nargsf,
                      PyObject* names) {
  auto* method = reinterpret_cast<Method*>(callable);
  auto positional = static_cast<std::size_t>(PyVectorcall_NARGS(nargsf));
  if (positional > 0 && PyObject_TypeCheck(args[0], base_type)) {
    Base& self = *reinterpret_cast<Base*>(args[0]);
    Arguments arguments;
    if (self.state && arguments.assign(*method->signature, args + 1, positional - 1, names)) {
      try {
        PyObject* result = method->short_way(self, method->kind, arguments);
        if (result != Py_NotImplemented) return result;
      } catch (...) {
        set_python_error();
        return nullptr;
      }
    }
  }
  return PyObject_Vectorcall(method->general, args, nargsf, names);
}

// The method's type.

PyObject* new_method(ShortWay short_way, const Signature& signature, const Kind* kind,
                     PyObject* general) {
  auto* method = PyObject_GC_New(Method, method_type);
  if (!method) return nullptr;
  method->call = call_method;
  method->general = Py_NewRef(general);
  method->short_way = short_way;
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
    state->board = communicator->has_board();
    state->barrier = communicator->prepare_barrier();
    state->communicator = std::move(communicator);
    delete std::exchange(base->state, state.release());
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

int State::spins() const {
  if (threads || !board) return 1;
  return communicator->group().in_crowd() ? kCrowdedSpins : kHeldSpins;
}

PyObject* default_op() { return name_sum; }

const ArrayStruct* plain_array(PyObject* object, int flags) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != array_type) return nullptr;
  const auto* array = py::detail::array_proxy(object);
  return (array->flags & flags) == flags && array->nd <= CallRecord::kMaxDims ? array : nullptr;
}

void bind_fast_calls(py::module_& m) {
  auto intern = [](const char* text) { return text ? PyUnicode_InternFromString(text) : nullptr; };
  constexpr std::array<const char*, kParameters> kNames = {
      nullptr,     "x",        "arrays", "op",     "root", "out",
      "algorithm", "async_op", "dest",   "source", "tag"};
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
        throw std::invalid_argument("a collective without a short way");
      },
      py::arg("collective"), "Decorate a communicator's method: it gets a short way to the core.");
  for (const Other& other : kOthers) {
    m.def(
        other.name,
        [&other](const py::object& method) {
          return py::reinterpret_steal<py::object>(
              new_method(other.short_way, other.signature, nullptr, method.ptr()));
        },
        py::arg("method"), "The same for this method.");
  }
  m.def(
      "use_work",
      [](const py::type& type) {
        work_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(type.ptr()));
      },
      py::arg("type"),
      "Make works of this class: with `_result`, and `_tasks` while it is under way.");
}

}  // namespace pycollective
