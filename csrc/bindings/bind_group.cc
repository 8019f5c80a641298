#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <variant>

#include "algorithms/algorithms.h"
#include "bindings/bindings.h"
#include "bindings/dtypes.h"
#include "bindings/errors.h"
#include "executor/communicator.h"
#include "executor/measure.h"
#include "schedule/tabulated.h"
#include "transport/mixed.h"
#include "transport/shared_heap.h"
#include "transport/shm.h"
#include "transport/tcp.h"
#include "transport/thread.h"

namespace py = pybind11;

namespace pycollective {
namespace {

// Arrays that Python has made fit; what would crash is still refused here.
struct Ends {
  std::optional<py::array> input, output;  // not there where the rank has none
};

void check_items(const std::optional<py::array>& array, std::size_t items, std::size_t item) {
  if (!array) {
    if (items) throw std::invalid_argument("this rank's input or output is missing");
    return;
  }
  if (!(array->flags() & py::array::c_style)) {
    throw std::invalid_argument("the core takes C-contiguous arrays");
  }
  auto held = static_cast<std::size_t>(array->size());
  if (held < items || static_cast<std::size_t>(array->itemsize()) != item) {
    throw std::invalid_argument("input and output differ in size");
  }
}

// `inputs` and `outputs`: items that will be read and written.
Array array_of(Ends& ends, std::size_t inputs, std::size_t outputs) {
  const py::array& typed = ends.input ? *ends.input : ends.output.value();
  Array array;
  array.item = static_cast<std::size_t>(typed.itemsize());
  array.type = py::str(typed.dtype());
  check_items(ends.input, inputs, array.item);
  check_items(ends.output, outputs, array.item);
  if (ends.input) array.input = ends.input->data();
  if (ends.output) array.output = ends.output->mutable_data();
  array.shape.assign(typed.shape(), typed.shape() + typed.ndim());
  array.count = static_cast<std::size_t>(typed.size());
  return array;
}

Array array_of(const py::array& input, const py::array& output) {
  Ends ends{input, output};
  if (input.nbytes() != output.nbytes()) {
    throw std::invalid_argument("input and output differ in size");
  }
  auto items = static_cast<std::size_t>(input.size());
  return array_of(ends, items, items);
}

// Of a collective whose chunks are ranks' parts of `count` items.
Array array_of_parts(Ends ends, Collective collective, std::size_t count, int played, int size) {
  auto items = [&](int chunks) { return static_cast<std::size_t>(chunks) * count; };
  Array array = array_of(ends, items(input_chunks(collective, size, played, size)),
                         items(output_chunks(collective, size, played, size)));
  array.count = count;
  return array;
}

std::size_t sum(const std::vector<std::size_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}

void check_root(int root, int size) {
  if (root < 0 || root >= size) {
    throw std::invalid_argument("root " + std::to_string(root) + " is not among the " +
                                std::to_string(size) + " ranks");
  }
}

Reducing reducing_of(const py::dtype& dtype, const std::string& op) {
  auto [type, which] = reduction_of(dtype, op);
  return {type, which, false};
}

const Algorithm& algorithm_of(Collective collective, const std::string& name) {
  if (const Algorithm* found = find_algorithm(collective, name)) return *found;
  std::string what(to_string(collective));
  throw std::invalid_argument("no " + what + " algorithm is called '" + name +
                              "'; pycollective.algorithms.names(\"" + what + "\") lists them");
}

// The same, where "auto" may be asked for.
const Algorithm& algorithm_of(const Communicator& self, Collective collective,
                              const std::string& name, std::size_t bytes) {
  return name == "auto" ? self.select(collective, bytes) : algorithm_of(collective, name);
}

// By name, or one that a user has written.
using Named = std::variant<std::string, std::shared_ptr<TabulatedAlgorithm>>;

const Algorithm& all_reduce_algorithm(Communicator& self, const Named& named, const Array& array) {
  int size = self.size();
  if (const auto* name = std::get_if<std::string>(&named)) {
    if (*name == "hierarchical") return self.hierarchical();
    return algorithm_of(self, Collective::all_reduce, *name, array.count * array.item);
  }
  const TabulatedAlgorithm& table = *std::get<1>(named);
  if (table.collective() != Collective::all_reduce || table.size() != size) {
    throw std::invalid_argument("'" + std::string(table.name()) + "' is a schedule for " +
                                std::string(to_string(table.collective())) + " among " +
                                std::to_string(table.size()) + " ranks, not for all_reduce among " +
                                std::to_string(size));
  }
  return table;
}

}  // namespace

void bind_group(py::module_& m) {
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const Failure& failure) {
      set_python_error(failure);
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
      .def("leave", &Group::leave, py::arg("rank"), py::call_guard<py::gil_scoped_release>(),
           "Leave the group in good order.")
      .def("abandon", &Group::abandon,
           "Let go of the group without a word to the peers: for a forked child.")
      .def_property_readonly("transport", &Group::transport, "What moves the bytes, in words.")
      .def_property_readonly("hosts", &Group::hosts,
                             "Each rank's host, by number: ranks of one number share memory.")
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
      .def("is_in", &ShmGroup::is_in, py::arg("rank"), "Whether a rank has joined and not left.");

  py::class_<TcpGroup, Group, std::shared_ptr<TcpGroup>>(
      m, "TcpGroup", "One rank of a group of processes on any hosts, over TCP.")
      .def(py::init([](int rank, const std::vector<std::vector<int>>& streams) {
             return std::make_shared<TcpGroup>(rank, streams);
           }),
           py::arg("rank"), py::arg("streams"),
           "A rank, and for each rank its connected, authenticated sockets: the control connection "
           "and one or more for messages. They are duplicated.")
      .def_property_readonly("rank", &TcpGroup::rank);

  py::class_<MixedGroup, Group, std::shared_ptr<MixedGroup>>(
      m, "MixedGroup", "One rank of a group of which some share a host.")
      .def(py::init<int, const std::vector<std::vector<int>>&, std::shared_ptr<ShmGroup>,
                    std::vector<int>>(),
           py::arg("rank"), py::arg("streams"), py::arg("memory"), py::arg("hosts"),
           "As TcpGroup; of ranks of this host only the control connection is needed. `memory` has "
           "the ranks of this host, and this rank has joined it.");

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
          "prefer",
          [](Communicator& self,
             const std::vector<std::tuple<Collective, std::size_t, std::string>>& rows) {
            std::vector<Choice> choices;
            for (const auto& [collective, most_bytes, name] : rows) {
              choices.push_back({collective, most_bytes, &algorithm_of(collective, name)});
            }
            self.prefer(std::move(choices));
          },
          py::arg("rows"),
          "What algorithm=\"auto\" means before the built-in table: (collective, most bytes, "
          "algorithm), the first row that fits. The same on all ranks, before the first call.")
      .def(
          "select",
          [](const Communicator& self, Collective collective, std::size_t bytes) {
            return std::string(self.select(collective, bytes).name());
          },
          py::arg("collective"), py::arg("bytes"), "What algorithm=\"auto\" means here.")
      .def(
          "all_reduce",
          [](Communicator& self, const py::array& input, py::array output, const std::string& op,
             const Named& algorithm, bool reproducible, double timeout) {
            Array array = array_of(input, output);
            Reducing reducing = reducing_of(input.dtype(), op);
            reducing.reproducible = reproducible;
            const Algorithm& how = all_reduce_algorithm(self, algorithm, array);
            Waiting waiting = waiting_for(timeout);
            py::gil_scoped_release release;
            self.reduce(how, array, reducing, 0, waiting);
          },
          py::arg("input"), py::arg("output"), py::arg("op"), py::arg("algorithm"),
          py::arg("reproducible"), py::arg("timeout"))
      .def(
          "reduce",
          [](Communicator& self, const py::array& input, std::optional<py::array> output,
             const std::string& op, int root, double timeout) {
            check_root(root, self.size());
            Ends ends{input, output};
            auto items = static_cast<std::size_t>(input.size());
            Array array = array_of(ends, items, self.rank() == root ? items : 0);
            Reducing reducing = reducing_of(input.dtype(), op);
            Waiting waiting = waiting_for(timeout);
            py::gil_scoped_release release;
            self.reduce(tree_reduce(), array, reducing, root, waiting);
          },
          py::arg("input"), py::arg("output"), py::arg("op"), py::arg("root"), py::arg("timeout"))
      .def(
          "reduce_scatter",
          [](Communicator& self, const py::array& input, py::array output, const std::string& op,
             const std::string& algorithm, double timeout) {
            Array array =
                array_of_parts({input, output}, Collective::reduce_scatter,
                               static_cast<std::size_t>(output.size()), self.rank(), self.size());
            Reducing reducing = reducing_of(input.dtype(), op);
            const Algorithm& how = algorithm_of(self, Collective::reduce_scatter, algorithm,
                                                static_cast<std::size_t>(input.nbytes()));
            Waiting waiting = waiting_for(timeout);
            py::gil_scoped_release release;
            self.reduce(how, array, reducing, 0, waiting);
          },
          py::arg("input"), py::arg("output"), py::arg("op"), py::arg("algorithm"),
          py::arg("timeout"))
      .def(
          "broadcast",
          [](Communicator& self, const py::array& input, py::array output, int root,
             const std::string& algorithm, double timeout) {
            check_root(root, self.size());
            Array array = array_of(input, output);
            const Algorithm& how = algorithm_of(self, Collective::broadcast, algorithm,
                                                static_cast<std::size_t>(input.nbytes()));
            Waiting waiting = waiting_for(timeout);
            py::gil_scoped_release release;
            self.move(how, array, root, waiting);
          },
          py::arg("input"), py::arg("output"), py::arg("root"), py::arg("algorithm"),
          py::arg("timeout"))
      .def(
          "move_parts",
          [](Communicator& self, Collective collective, std::optional<py::array> input,
             std::optional<py::array> output, std::size_t count, std::vector<std::int64_t> shape,
             int root, double timeout) {
            check_root(root, self.size());
            const Algorithm& how = default_algorithm(collective);
            int played = (self.rank() - root + self.size()) % self.size();
            Array array = array_of_parts({input, output}, collective, count, played, self.size());
            array.shape = std::move(shape);
            Waiting waiting = waiting_for(timeout);
            py::gil_scoped_release release;
            self.move(how, array, root, waiting);
          },
          py::arg("collective"), py::arg("input"), py::arg("output"), py::arg("count"),
          py::arg("shape"), py::arg("root"), py::arg("timeout"),
          "Gather, scatter, all_gather or all_to_all of parts of `count` items; `shape` is what "
          "the "
          "ranks must agree on.")
      .def(
          "all_gather_ragged",
          [](Communicator& self, const py::array& input, py::array output,
             const std::vector<std::size_t>& counts, std::vector<std::int64_t> shape,
             double timeout) {
            if (static_cast<int>(counts.size()) != self.size()) {
              throw std::invalid_argument("one count for each rank");
            }
            Ends ends{input, output};
            Array array =
                array_of(ends, counts[static_cast<std::size_t>(self.rank())], sum(counts));
            array.shape = std::move(shape);
            Waiting waiting = waiting_for(timeout);
            py::gil_scoped_release release;
            self.all_gather(array, counts, waiting);
          },
          py::arg("input"), py::arg("output"), py::arg("counts"), py::arg("shape"),
          py::arg("timeout"))
      .def(
          "all_to_all_ragged",
          [](Communicator& self, const py::array& input, py::array output,
             const std::vector<std::size_t>& input_counts,
             const std::vector<std::size_t>& output_counts, std::vector<std::int64_t> shape,
             double timeout) {
            if (static_cast<int>(input_counts.size()) != self.size() ||
                static_cast<int>(output_counts.size()) != self.size()) {
              throw std::invalid_argument("one count for each rank");
            }
            auto own = static_cast<std::size_t>(self.rank());
            if (input_counts[own] != output_counts[own]) {
              throw std::invalid_argument("a rank receives from itself what it sends to itself");
            }
            Ends ends{input, output};
            Array array = array_of(ends, sum(input_counts), sum(output_counts));
            array.shape = std::move(shape);
            Waiting waiting = waiting_for(timeout);
            py::gil_scoped_release release;
            self.all_to_all(array, input_counts, output_counts, waiting);
          },
          py::arg("input"), py::arg("output"), py::arg("input_counts"), py::arg("output_counts"),
          py::arg("shape"), py::arg("timeout"))
      .def(
          "empty",
          [](Communicator& self, const std::vector<py::ssize_t>& shape, const py::dtype& dtype,
             double timeout) -> std::optional<py::array> {
            Array array;
            array.shape.assign(shape.begin(), shape.end());
            array.type = py::str(dtype);
            auto bytes = static_cast<std::size_t>(dtype.itemsize());
            for (py::ssize_t items : shape) bytes *= static_cast<std::size_t>(items);
            Waiting waiting = waiting_for(timeout);
            std::shared_ptr<SharedHeap> heap = self.group().heap();
            std::byte* part = nullptr;
            {
              py::gil_scoped_release release;
              self.meet("empty", array, waiting);
              if (!heap) return {};
              part = self.allocate(*heap, bytes, waiting);
            }
            struct Owner {
              std::shared_ptr<SharedHeap> heap;
              std::byte* part;
              ~Owner() { heap->release(part); }
            };
            auto owner = std::make_unique<Owner>(std::move(heap), part);
            py::capsule keeper(owner.get(), [](void* kept) { delete static_cast<Owner*>(kept); });
            owner.release();
            return py::array(dtype, shape, part, keeper);
          },
          py::arg("shape"), py::arg("dtype"), py::arg("timeout"),
          "An array that all ranks of a host reach, or None where there is nothing to gain.")
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
         const std::string& op, const Named& algorithm, double timeout) {
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
        Reducing reducing = reducing_of(inputs[0].dtype(), op);
        const Algorithm& how = all_reduce_algorithm(*pointers[0], algorithm, arrays[0]);
        Waiting waiting = waiting_for(timeout);
        py::gil_scoped_release release;
        Communicator::all_reduce_together(pointers, arrays, reducing, how, waiting);
      },
      py::arg("communicators"), py::arg("inputs"), py::arg("outputs"), py::arg("op"),
      py::arg("algorithm"), py::arg("timeout"),
      "The all_reduce of every rank of a group, by the calling thread alone.");

  m.def("measure_all_reduce", &measure_all_reduce, py::arg("how"), py::arg("ranks"),
        py::arg("bytes"), py::arg("iterations"), py::call_guard<py::gil_scoped_release>(),
        "Seconds of each iteration of a float32 sum among threads, done in the way `how`.");
  m.def(
      "measure_rates",
      [](int ranks, std::size_t bytes, int iterations) {
        Rates rates = measure_rates(ranks, bytes, iterations);
        return std::pair(rates.copy, rates.reduce);
      },
      py::arg("ranks"), py::arg("bytes"), py::arg("iterations"),
      py::call_guard<py::gil_scoped_release>(),
      "Bytes a second that each of `ranks` threads copies, and adds, at the same time.");
}

}  // namespace pycollective
