// The fast path from Python to the core: parts shared by collective calls (fast_calls.cc),
// all_reduce_many (fast_many.cc) and messages (fast_messages.cc).
#pragma once

#include <pybind11/numpy.h>

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "executor/communicator.h"

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
  tag
};
inline constexpr std::size_t kParameters = 11;

// The parameters of a method, in the order of its declaration. The first `positional` of them may
// be positional arguments.
struct Signature {
  std::array<Parameter, 6> parameters;
  std::size_t positional;
};

// The arguments of a call by parameter; nullptr where there is none.
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

// Reads a number between 0 and `most`. Returns false if the value is not such a number. Raises
// nothing.
bool read_number(PyObject* value, int most, int& found);

// A collective, as its Python method declares it.
struct Kind {
  Collective collective;
  Signature signature;
  bool is_in_place;  // the output may be the input or a part of it
};

// A cached call.
struct Known {
  const Kind* kind = nullptr;  // nullptr: an empty entry
  pybind11::object descr, op;  // compared by identity; the references keep them alive
  int root = 0, dims = 0;
  std::array<Py_intptr_t, CallRecord::kMaxDims> shape{};  // of the input or of a scatter's output
  // True if the call uses the direct path, and if "auto" selects the same.
  bool direct = false, automatic = false;
  // Items of this rank's input and output, and bytes of an item.
  std::size_t inputs = 0, outputs = 0, item = 1;
  std::size_t bytes() const { return std::max(inputs, outputs) * item; }
  int output_dims = 0;
  std::array<Py_intptr_t, CallRecord::kMaxDims> output_shape{};
  PreparedCall prepared;
};

// A cached message: its shape and dtype.
struct KnownMessage {
  pybind11::object descr;  // nullptr: an empty entry
  Envelope envelope;
};

// A cached all-reduce of several arrays of one dtype, joined to one.
struct KnownPack {
  pybind11::object descr, op;        // nullptr: an empty entry
  std::vector<std::int64_t> shapes;  // kNextArray between the arrays' shapes
  PreparedCall prepared;
};

// The state of a Python Communicator for the fast path.
struct State {
  std::shared_ptr<Communicator> communicator;
  bool threads = false, board = false;
  PreparedCall barrier;
  // The number of polls of a short call that keeps the GIL. Peers that are threads need the GIL,
  // and peers on other hosts take longer.
  int spins() const;
  std::array<Known, 16> known;
  std::size_t last = 0, oldest = 0;
  std::array<KnownMessage, 8> messages;
  std::size_t oldest_message = 0;
  std::array<KnownPack, 4> packs;
  std::size_t oldest_pack = 0;
};

struct Base {
  PyObject_HEAD State* state;  // nullptr: not attached, or closed
  double timeout;              // positive seconds; the default timeout of calls
};

// Makes a call. Returns its result, nullptr with a Python error, or Py_NotImplemented (borrowed) if
// the fast path does not support the call. Throws the core's exceptions and Python's.
using FastPath = PyObject* (*)(Base& self, const Kind* kind, const Arguments& arguments);

PyObject* send_message(Base& self, const Kind*, const Arguments& arguments);
PyObject* receive_message(Base& self, const Kind*, const Arguments& arguments);
PyObject* reduce_many(Base& self, const Kind*, const Arguments& arguments);

// The default op: the interned string "sum".
PyObject* default_op();

// Returns nullptr if the object is not an array that the core can use as it is.
const ArrayStruct* plain_array(PyObject* object, int flags);

}  // namespace pycollective
