// The short way from Python to the core: what collective calls (fast_calls.cc), all_reduce_many
// (fast_many.cc) and messages (fast_messages.cc) share.
#pragma once

#include <pybind11/numpy.h>

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "executor/communicator.h"

namespace pycollective {

using ArrayStruct = pybind11::detail::PyArray_Proxy;

// The parameters that the short way knows, of all methods.
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

// The parameters of a method in the order of its declaration. The first `positional` may be given
// by position.
struct Signature {
  std::array<Parameter, 6> parameters;
  std::size_t positional;
};

// The arguments of a call, by parameter; nullptr where there is none.
class Arguments {
 public:
  // Returns false if the short way does not take these arguments. Raises nothing.
  bool assign(const Signature& signature, PyObject* const* args, std::size_t positional,
              PyObject* names);
  PyObject* operator[](Parameter parameter) const {
    return values_[static_cast<std::size_t>(parameter)];
  }
  // The same, where None says that there is none.
  PyObject* unless_none(Parameter parameter) const {
    PyObject* value = (*this)[parameter];
    return value == Py_None ? nullptr : value;
  }

 private:
  std::array<PyObject*, kParameters> values_{};
};

// Reads a number of 0 to `most`. Returns false if it is none. Raises nothing.
bool read_number(PyObject* value, int most, int& found);

// A collective as its method in Python declares it.
struct Kind {
  Collective collective;
  Signature signature;
  bool is_in_place;  // the output may be the input, or a part of it
};

// A call as it was made before.
struct Known {
  const Kind* kind = nullptr;  // nullptr: nothing is known here
  pybind11::object descr, op;  // compared by identity, so they are kept
  int root = 0, dims = 0;
  std::array<Py_intptr_t, CallRecord::kMaxDims> shape{};  // of the input, or of a scatter's output
  // Whether it goes by the direct path, and whether it does what "auto" means.
  bool direct = false, automatic = false;
  // What it needs of this rank: items of the input, of the output; their bytes, and how many move.
  std::size_t inputs = 0, outputs = 0, item = 1;
  std::size_t bytes() const { return std::max(inputs, outputs) * item; }
  int output_dims = 0;
  std::array<Py_intptr_t, CallRecord::kMaxDims> output_shape{};
  PreparedCall prepared;
};

// Messages of one shape and dtype.
struct KnownMessage {
  pybind11::object descr;  // nullptr: nothing is known here
  Envelope envelope;
};

// An all-reduce of several arrays of one dtype, joined.
struct KnownPack {
  pybind11::object descr, op;        // nullptr: nothing is known here
  std::vector<std::int64_t> shapes;  // kNextArray between the arrays
  PreparedCall prepared;
};

// The base of a Communicator in Python: its end of the core.
struct State {
  std::shared_ptr<Communicator> communicator;
  bool threads = false, board = false;
  PreparedCall barrier;
  // How often a short call polls for its peers while the interpreter is kept. Peers that are
  // threads cannot come meanwhile; those on other hosts come later.
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
  double timeout;              // seconds that it waits unless a call says otherwise; checked
};

// Makes a call. Returns its result, nullptr with a Python error, or Py_NotImplemented (borrowed)
// where the call is none for the short way. Throws as the core does, and what Python raises.
using ShortWay = PyObject* (*)(Base& self, const Kind* kind, const Arguments& arguments);

PyObject* send_message(Base& self, const Kind*, const Arguments& arguments);
PyObject* receive_message(Base& self, const Kind*, const Arguments& arguments);
PyObject* reduce_many(Base& self, const Kind*, const Arguments& arguments);

// The op of a call that names none: the interned "sum".
PyObject* default_op();

// Returns nullptr unless it is an array that the core can take as it is.
const ArrayStruct* plain_array(PyObject* object, int flags);

}  // namespace pycollective
