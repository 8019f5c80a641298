#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>

#include "algorithms/algorithms.h"
#include "bindings/bindings.h"
#include "executor/communicator.h"
#include "executor/measure.h"
#include "transport/shm.h"
#include "transport/tcp.h"
#include "transport/thread.h"

namespace py = pybind11;

namespace pycollective {
namespace {

const char* error_name(FailureKind kind) {
  switch (kind) {
    case FailureKind::timeout:
      return "CollectiveTimeoutError";
    case FailureKind::mismatch:
      return "MismatchError";
    case FailureKind::peer_lost:
      return "PeerLostError";
    case FailureKind::aborted:
      return "AbortedError";
  }
  return "CollectiveError";
}

// The memory of two arrays that Python has made fit; what would crash is still refused here.
Array array_of(const py::array& input, py::array& output) {
  if (!(input.flags() & py::array::c_style) || !(output.flags() & py::array::c_style)) {
    throw std::invalid_argument("the core takes C-contiguous arrays");
  }
  if (input.nbytes() != output.nbytes() || input.itemsize() != output.itemsize()) {
    throw std::invalid_argument("input and output differ in size");
  }
  Array array;
  array.input = input.data();
  array.output = output.mutable_data();
  array.shape.assign(input.shape(), input.shape() + input.ndim());
  array.count = static_cast<std::size_t>(input.size());
  array.item = static_cast<std::size_t>(input.itemsize());
  return array;
}

std::optional<DType> dtype_of(const py::dtype& dtype) {
  if (dtype.byteorder() == '>') return {};
  bool four = dtype.itemsize() == 4, eight = dtype.itemsize() == 8;
  if (dtype.kind() == 'f' && four) return DType::f32;
  if (dtype.kind() == 'f' && eight) return DType::f64;
  if (dtype.kind() == 'i' && four) return DType::i32;
  if (dtype.kind() == 'i' && eight) return DType::i64;
  return {};
}

DType reducible(const py::dtype& dtype) {
  if (auto found = dtype_of(dtype)) return *found;
  std::string known;
  for (int i = 0; i < kDTypes; ++i) append_name(known, to_string(static_cast<DType>(i)));
  throw py::type_error("all_reduce has no reduction for dtype " + std::string(py::str(dtype)) +
                       "; it takes " + known + ": convert the array with astype first");
}

Op op_of(const std::string& name) {
  std::string known;
  for (int i = 0; i < kOps; ++i) {
    if (to_string(static_cast<Op>(i)) == name) return static_cast<Op>(i);
    append_name(known, to_string(static_cast<Op>(i)));
  }
  throw std::invalid_argument("unknown op '" + name + "'; there are: " + known);
}

const Algorithm& all_reduce_algorithm(const std::string& name) {
  if (const Algorithm* found = find_algorithm(Collective::all_reduce, name)) return *found;
  throw std::invalid_argument("no all_reduce algorithm is called '" + name +
                              "'; algorithm_names() lists them");
}

Waiting waiting_for(double seconds) {
  // A year stands for "for ever": the clock cannot hold every double.
  double bounded = seconds < 3e7 ? seconds : 3e7;
  return {Clock::now() +
              std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded)),
          [] {
            py::gil_scoped_acquire acquire;
            if (PyErr_CheckSignals() != 0) throw py::error_already_set();
          }};
}

}  // namespace

void bind_group(py::module_& m) {
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const Failure& failure) {
      py::object type = py::module_::import("pycollective.errors").attr(error_name(failure.kind));
      PyErr_SetString(type.ptr(), failure.what());
    }
  });

  py::class_<Group, std::shared_ptr<Group>>(m, "Group", "Ranks that communicate.")
      .def_property_readonly("size", &Group::size)
      .def(
          "abort",
          [](Group& group, const std::string& message, bool peer_lost) {
            group.fail(peer_lost ? FailureKind::peer_lost : FailureKind::aborted, message);
          },
          py::arg("message"), py::arg("peer_lost") = false,
          py::call_guard<py::gil_scoped_release>(),
          "Fail every rank's present or next call with AbortedError, or with PeerLostError.")
      .def_property_readonly(
          "failure",
          [](const Group& group) -> std::optional<std::string> {
            auto failure = group.failure();
            if (!failure) return {};
            return std::string(failure->what());
          },
          "Why the group is dead, or None.")
      .def("describe", &Group::describe_ranks, "What each rank is doing.");

  py::class_<ThreadGroup, Group, std::shared_ptr<ThreadGroup>>(
      m, "ThreadGroup", "Ranks that are threads of this process.")
      .def(py::init([](int size) {
             if (size < 1 || size > 4096) {
               throw std::invalid_argument("a local group has 1 to 4096 ranks, not " +
                                           std::to_string(size));
             }
             return std::make_shared<ThreadGroup>(size);
           }),
           py::arg("size"));

  py::class_<ShmGroup, Group, std::shared_ptr<ShmGroup>>(
      m, "ShmGroup", "Ranks that are processes of one host, through shared memory.")
      .def_static("create", &ShmGroup::create, py::arg("size"), "The memory of a new group.")
      .def_static("open", &ShmGroup::open, py::arg("descriptor"),
                  "The group whose memory a descriptor, which is duplicated, stands for.")
      .def_property_readonly("descriptor", &ShmGroup::descriptor)
      .def("join", &ShmGroup::join, py::arg("rank"), "Take the place of a rank.")
      .def("leave", &ShmGroup::leave, py::arg("rank"), "Leave the group in good order.")
      .def("is_in", &ShmGroup::is_in, py::arg("rank"), "Whether a rank has joined and not left.");

  py::class_<TcpGroup, Group, std::shared_ptr<TcpGroup>>(
      m, "TcpGroup", "One rank of a group of processes on any hosts, over TCP.")
      .def(py::init<int, const std::vector<std::vector<int>>&>(), py::arg("rank"),
           py::arg("streams"),
           "A rank, and for each rank its connected, authenticated sockets: the control connection "
           "and one or more for messages. They are duplicated.")
      .def_property_readonly("rank", &TcpGroup::rank)
      .def("leave", &TcpGroup::leave, py::call_guard<py::gil_scoped_release>(),
           "Leave the group in good order, and close the connections.")
      .def("abandon", &TcpGroup::abandon,
           "Close the connections without a word: for a forked child.");

  py::class_<Communicator, std::shared_ptr<Communicator>>(m, "Communicator",
                                                          "One rank's end of a group.")
      .def(py::init([](std::shared_ptr<Group> group, int rank) {
             if (rank < 0 || rank >= group->size()) throw std::out_of_range("no such rank");
             return std::make_shared<Communicator>(std::move(group), rank);
           }),
           py::arg("group"), py::arg("rank"))
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def(
          "all_reduce",
          [](Communicator& self, const py::array& input, py::array output, const std::string& op,
             const std::string& algorithm, double timeout) {
            Array array = array_of(input, output);
            DType dtype = reducible(input.dtype());
            Op which = op_of(op);
            const Algorithm& how = all_reduce_algorithm(algorithm);
            Waiting waiting = waiting_for(timeout);
            py::gil_scoped_release release;
            self.all_reduce(array, dtype, which, how, waiting);
          },
          py::arg("input"), py::arg("output"), py::arg("op"), py::arg("algorithm"),
          py::arg("timeout"))
      .def(
          "broadcast",
          [](Communicator& self, const py::array& input, py::array output, int root,
             double timeout) {
            Array array = array_of(input, output);
            std::string type = py::str(input.dtype());
            if (root < 0 || root >= self.size()) {
              throw std::invalid_argument("root " + std::to_string(root) + " is not among the " +
                                          std::to_string(self.size()) + " ranks");
            }
            Waiting waiting = waiting_for(timeout);
            py::gil_scoped_release release;
            self.broadcast(array, type.c_str(), root, waiting);
          },
          py::arg("input"), py::arg("output"), py::arg("root"), py::arg("timeout"))
      .def(
          "barrier",
          [](Communicator& self, double timeout) {
            Waiting waiting = waiting_for(timeout);
            py::gil_scoped_release release;
            self.barrier(waiting);
          },
          py::arg("timeout"));

  m.def(
      "all_reduce_together",
      [](const std::vector<std::shared_ptr<Communicator>>& communicators,
         const std::vector<py::array>& inputs, std::vector<py::array> outputs,
         const std::string& op, const std::string& algorithm, double timeout) {
        if (communicators.empty() || inputs.size() != communicators.size() ||
            outputs.size() != communicators.size()) {
          throw std::invalid_argument("one input and one output for each communicator");
        }
        std::vector<Array> arrays;
        std::vector<Communicator*> pointers;
        for (std::size_t r = 0; r < communicators.size(); ++r) {
          if (!inputs[r].dtype().equal(inputs[0].dtype()) || inputs[r].size() != inputs[0].size()) {
            throw std::invalid_argument("the ranks' arrays differ in dtype or size");
          }
          arrays.push_back(array_of(inputs[r], outputs[r]));
          pointers.push_back(communicators[r].get());
        }
        DType dtype = reducible(inputs[0].dtype());
        Op which = op_of(op);
        const Algorithm& how = all_reduce_algorithm(algorithm);
        Waiting waiting = waiting_for(timeout);
        py::gil_scoped_release release;
        Communicator::all_reduce_together(pointers, arrays, dtype, which, how, waiting);
      },
      py::arg("communicators"), py::arg("inputs"), py::arg("outputs"), py::arg("op"),
      py::arg("algorithm"), py::arg("timeout"),
      "The all_reduce of every rank of a group, by the calling thread alone.");

  m.def("measure_all_reduce", &measure_all_reduce, py::arg("how"), py::arg("ranks"),
        py::arg("bytes"), py::arg("iterations"), py::call_guard<py::gil_scoped_release>(),
        "Seconds of each iteration of a float32 sum among threads, done in the way `how`.");
}

}  // namespace pycollective
