// The fast path from Python to the core: parts shared by collective calls (fast_calls.cc),
// all_reduce_many (fast_many.cc) and messages (fast_messages.cc).
#pragma once

#include <pybind11/numpy.h>

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>

#include "executor/communicator.h"
#include "executor/repeated_calls.h"

namespace pycollective {

using ArrayStruct = pybind11::detail::PyArray_Proxy;

// The parameters of all methods that the fast path supports.
enum class Parameter : std::uint8_t {
  none,
  x,
  arrays,
  op,
  root,
  out,
  algorithm,
  async_op,
  dest,
  source,
  tag,
  counts,
  out_counts
};
inline constexpr std::size_t kParameters = 13;

// The parameters of a method, in the order of its declaration. The first `positional` of them may
// be positional arguments.
struct Signature {
  std::array<Parameter, 6> parameters;
  std::size_t positional;
};

// The arguments of a call, by parameter; nullptr for those not given.
class Arguments {
 public:
  // Returns false if the fast path does not support these arguments. Raises nothing.
  bool assign(const Signature& signature, PyObject* const* args, std::size_t positional,
              PyObject* names);
  PyObject* operator[](Parameter parameter) const {
    return values_[static_cast<std::size_t>(parameter)];
  }
  // Returns an argument, or nullptr for None.
  PyObject* unless_none(Parameter parameter) const {
    PyObject* value = (*this)[parameter];
    return value == Py_None ? nullptr : value;
  }

 private:
  std::array<PyObject*, kParameters> values_{};
};

// Reads an int from 0 to `most`. Returns false for other values. Raises nothing.
bool read_number(PyObject* value, int most, int& found);

// A collective, as its Python method declares it.
struct Kind {
  Collective collective;
  Signature signature;
};

// The state of a Python Communicator for the fast path.
struct State {
  explicit State(std::shared_ptr<Communicator> core)
      : communicator(std::move(core)),
        repeated(*communicator),
        barrier(communicator->prepare_barrier()) {}

  const std::shared_ptr<Communicator> communicator;
  RepeatedCalls repeated;
  const PreparedCall barrier;
  int uses = 0;  // calls on the fast path; changed with the GIL
  bool detached = false;
};

// A call's use of a State. Python code within the call, or another thread, may close the
// communicator: the State then remains until the end of the call.
class Use {
 public:
  explicit Use(State& state) : state_(state) { ++state_.uses; }
  ~Use() {
    if (--state_.uses == 0 && state_.detached) delete &state_;
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  State& state_;
};

// Python's CommunicatorBase.
struct Base {
  PyObject_HEAD State* state;  // nullptr: not attached, or closed
  double timeout;              // positive seconds; the default timeout of calls
  int rank, size;

  // Returns true if the communicator was closed since the call read its State.
  bool has_left(const State& read) const { return state != &read; }
};

// Makes a call. Returns its result, nullptr with a Python error, or Py_NotImplemented (borrowed) if
// the fast path does not support the call. Throws the core's exceptions and Python's.
using FastPath = PyObject* (*)(Base& self, const Kind* kind, const Arguments& arguments);

PyObject* send_message(Base& self, const Kind*, const Arguments& arguments);
PyObject* receive_message(Base& self, const Kind*, const Arguments& arguments);
PyObject* reduce_many(Base& self, const Kind*, const Arguments& arguments);

// The default op: the interned string "sum".
PyObject* default_op();

// Reads the argument async_op. Returns false if it is no bool. Raises nothing.
bool read_async_op(const Arguments& arguments, bool& found);

// The flags of arrays that the core can read without a copy.
inline constexpr int kReadable = pybind11::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_ |
                                 pybind11::detail::npy_api::NPY_ARRAY_ALIGNED_;

// Returns nullptr if the object is not an array that the core can use without a copy.
const ArrayStruct* plain_array(PyObject* object, int flags);

inline Lengths lengths_of(const ArrayStruct& array) {
  return {array.dimensions, static_cast<std::size_t>(array.nd)};
}

// Returns the elements of an array's dtype; nothing if the fast path does not support it. `op` is
// nullptr if the call reduces nothing; otherwise sets `reducing`. Throws Python's errors.
std::optional<Elements> elements_of(PyObject* descr, PyObject* op, Reducing& reducing);

// Keeps objects alive. The owner releases them with the GIL.
std::shared_ptr<void> kept(PyObject* first, PyObject* second = nullptr);

// Makes a call after the asynchronous ones, and waits for it. A short call keeps the GIL for some
// polls.
void run_prepared(Base& self, const PreparedCall& prepared, const void* input, void* output,
                  std::size_t bytes);

// Returns the Work of a call. The call is done if `task` is nullptr or has succeeded.
PyObject* new_work(const std::shared_ptr<Task>& task, PyObject* result);

}  // namespace pycollective
