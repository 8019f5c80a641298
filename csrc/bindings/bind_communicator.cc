#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "algorithms/algorithms.h"
#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/communicator.h"
#include "bindings/dtypes.h"
#include "bindings/errors.h"
#include "executor/communicator.h"
#include "schedule/tabulated.h"
#include "support/interpreter_release.h"
#include "support/lasting.h"

namespace py = pybind11;

namespace pycollective {
namespace {

// The arrays of a call. Python has prepared them; arrays that would crash the core are still
// rejected.
struct Ends {
  std::optional<py::array> input, output;  // empty where the rank has none
};

void check_items(const std::optional<py::array>& array, std::size_t items, std::size_t item) {
  if (!array) {
    if (items) throw std::invalid_argument("this rank's input or output is missing");
    return;
  }
  if (!(array->flags() & py::array::c_style)) {
    throw std::invalid_argument("arrays must be C-contiguous");
  }
  auto held = static_cast<std::size_t>(array->size());
  if (held < items || static_cast<std::size_t>(array->itemsize()) != item) {
    throw std::invalid_argument("input and output differ in size");
  }
}

// Returns the arrays of a call. `inputs` and `outputs`: the items that will be read and written.
Array array_of(Ends& ends, std::size_t inputs, std::size_t outputs) {
  const py::array& typed = ends.input ? *ends.input : ends.output.value();
  Array array;
  array.item = static_cast<std::size_t>(typed.itemsize());
  array.type = name_of(typed.dtype());
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

// Returns the arrays of a collective whose chunks are ranks' parts of `count` items.
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

Reducing reducing_of(const py::dtype& dtype, const std::string& op) {
  auto [type, operation] = reduction_of(dtype, op);
  return {type, operation, false};
}

const Algorithm& algorithm_of(Collective collective, const std::string& name) {
  if (const Algorithm* found = find_algorithm(collective, name)) return *found;
  std::string what(to_string(collective));
  throw std::invalid_argument("no " + what + " algorithm is called '" + name +
                              "'; pycollective.algorithms.names(\"" + what + "\") lists them");
}

std::size_t bytes_of(const py::array& array) { return static_cast<std::size_t>(array.nbytes()); }

}  // namespace

const Algorithm& algorithm_of(Communicator& self, Collective collective, const Named& named,
                              std::size_t bytes) {
  int size = self.size();
  if (const auto* name = std::get_if<std::string>(&named)) {
    if (*name == "auto") return self.select(collective, bytes);
    if (collective == Collective::all_reduce && *name == "hierarchical") return self.hierarchical();
    return algorithm_of(collective, *name);
  }
  const TabulatedAlgorithm& table = *std::get<1>(named);
  if (table.collective() != collective || table.size() != size) {
    throw std::invalid_argument(
        "'" + std::string(table.name()) + "' is a schedule for " +
        std::string(to_string(table.collective())) + " among " + std::to_string(table.size()) +
        " ranks, not for " + std::string(to_string(collective)) + " among " + std::to_string(size));
  }
  return table;
}

void exchange(Communicator& self, Message& message, double timeout) {
  Messages& messages = self.messages();
  messages.collect();
  std::optional<bool> done;
  if (const int polls = self.held_polls(message.bytes()); polls > 0) {
    done = messages.try_start(message, polls);
    if (done.value_or(false)) return;
  }
  const Waiting waiting = waiting_for(timeout);
  InterpreterRelease release;
  if (!done) done = messages.start(message, 1);
  if (!*done) messages.finish(message, waiting);
}

void check_root(int root, int size) {
  if (root < 0 || root >= size) {
    throw std::invalid_argument("root " + std::to_string(root) + " is not among the " +
                                std::to_string(size) + " ranks");
  }
}

namespace {

// Sends or receives a message.
std::shared_ptr<Task> post(Communicator& self, const py::array& array, void* data, int peer,
                           int tag, double timeout, bool later, bool sends,
                           const std::string& label) {
  if (peer < 0 || peer >= self.size()) {
    throw std::invalid_argument("rank " + std::to_string(peer) + " is not among the " +
                                std::to_string(self.size()) + " ranks");
  }
  if (!(array.flags() & py::array::c_style)) {
    throw std::invalid_argument("arrays must be C-contiguous");
  }
  const std::vector<std::int64_t> shape(array.shape(), array.shape() + array.ndim());
  Envelope envelope(label.empty() ? name_of(array.dtype()) : label, shape.data(),
                    static_cast<int>(shape.size()), bytes_of(array));
  envelope.tag = tag;
  if (later) {
    return self.messages().post(sends, peer, envelope, data, waiting_for(timeout, {}),
                                std::make_shared<py::array>(array));
  }
  Message message(sends, peer, envelope, data);
  exchange(self, message, timeout);
  return nullptr;
}

// Communicators that were deleted on their own threads. A thread cannot join itself, so the end of
// the next communicator joins these threads.
struct Unjoined {
  std::mutex mutex;
  std::vector<std::unique_ptr<Communicator>> communicators;
};

// Ends a communicator. Its running calls fail, because no thread can wait for them.
void end(Communicator* communicator) {
  std::vector<std::unique_ptr<Communicator>> ended;
  const bool is_inside = communicator->is_on_own_thread();
  if (communicator->outstanding() > (is_inside ? 1 : 0)) {  // the call on this thread is over
    communicator->group().fail({FailureKind::aborted,
                                "rank " + std::to_string(communicator->rank()) +
                                    " deleted its communicator before its calls were done",
                                {communicator->rank()}});
    if (interpreter_is_ending()) {
      // A thread in a call may wait for the GIL until the process ends: nobody can join it.
      InterpreterRelease release;
      if (!communicator->is_of_parent()) communicator->group().leave(communicator->rank());
      return;
    }
  }
  {
    InterpreterRelease release;  // a running call may need the GIL to end
    communicator->stop();
    // Peers must not wait for this rank any more. A forked child does not act for the rank;
    // besides, threads that exist only in the parent may hold the group's mutexes.
    if (!communicator->is_of_parent()) communicator->group().leave(communicator->rank());
  }
  auto& unjoined = lasting<Unjoined>();
  {
    std::lock_guard lock(unjoined.mutex);
    if (!is_inside) ended.swap(unjoined.communicators);
    (is_inside ? unjoined.communicators : ended).emplace_back(communicator);
  }
  InterpreterRelease release;
  for (const auto& each : ended) each->stop();
}

// Makes a call: after the running calls, or asynchronously if `later`, without the GIL. The timeout
// counts from the begin of the call.
std::shared_ptr<Task> make_call(Communicator& self, Ends ends, double timeout, bool later,
                                PreparedCall call) {
  if (later) {
    return self.submit(std::move(call), duration_of(timeout),
                       std::make_shared<Ends>(std::move(ends)));
  }
  Interrupt interrupt = check_signals;
  InterpreterRelease release;
  self.wait_for_tasks(interrupt);
  self.run(call, waiting_for(timeout, std::move(interrupt)));
  return nullptr;
}

// Lets threads of the core call Python for warnings, until the interpreter ends.
class WarningGate {
 public:
  void run(const std::function<void()>& call) {
    std::shared_lock lock(mutex_, std::defer_lock);
    if (!lock.try_lock() || closed_) return;
    call();
  }
  void close() {
    // In a forked child, the lock may stay locked by a thread of the parent.
    std::unique_lock lock(mutex_, std::defer_lock);
    if (lock.try_lock_for(std::chrono::seconds(1))) closed_ = true;
  }

 private:
  std::shared_timed_mutex mutex_;
  bool closed_ = false;
};

WarningGate& warning_gate() { return lasting<WarningGate>(); }

std::function<void(const std::string&)> calling(const py::function& warn) {
  // Any thread may release the function, and needs the GIL for it.
  std::shared_ptr<py::function> kept(new py::function(warn), [](py::function* function) {
    py::gil_scoped_acquire acquire;
    delete function;
  });
  return [kept](const std::string& text) {
    warning_gate().run([&] {
      InterpreterLock lock;
      (*kept)(text);
    });
  };
}

double seconds_at(Clock::time_point time) {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

}  // namespace

void bind_communicator(py::module_& m) {
  py::module_::import("atexit").attr("register")(
      py::cpp_function([] { warning_gate().close(); }, py::call_guard<InterpreterRelease>()));

  py::class_<Task, std::shared_ptr<Task>>(m, "Task", "An asynchronous call.")
      .def_property_readonly("done", &Task::done)
      .def(
          "wait",
          [](Task& self, double timeout) {
            if (self.done()) return true;
            std::shared_ptr<void> owner = self.owner();  // released with the GIL
            InterpreterRelease release;
            return self.wait(deadline_in(timeout), check_signals);
          },
          py::arg("timeout"),
          "Wait for at most `timeout` seconds. Return True if the call is done.")
      .def_property_readonly(
          "times",
          [](const Task& self) {
            if (!self.done()) throw std::logic_error("the call is still running");
            return std::pair(seconds_at(self.began()), seconds_at(self.ended()));
          },
          "The begin and the end of a call that is done, as of time.monotonic().")
      .def(
          "check",
          [](Task& self) {
            if (self.done()) self.release();  // the call no longer uses the arrays
            self.check();
          },
          "Raise the call's error, if it has raised one.");

  py::class_<Communicator, std::shared_ptr<Communicator>>(m, "Communicator", "One rank of a group.")
      .def(py::init([](std::shared_ptr<Group> group, int rank) {
             if (rank < 0 || rank >= group->size())
               throw std::out_of_range("the rank is not in the group");
             return std::shared_ptr<Communicator>(new Communicator(std::move(group), rank), end);
           }),
           py::arg("group").none(false), py::arg("rank"))
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def(
          "prefer",
          [](Communicator& self,
             const std::vector<std::tuple<Collective, std::size_t, std::string>>& rows) {
            std::vector<Choice> choices;
            for (const auto& [collective, most_bytes, name] : rows) {
              choices.push_back({collective, most_bytes, &algorithm_of(self, collective, name, 0)});
            }
            self.prefer(std::move(choices));
          },
          py::arg("rows"),
          "Add rows (collective, maximum of bytes, algorithm) before the built-in table of "
          "algorithm=\"auto\". The first row that fits is used. All ranks must add the same rows "
          "before the first call.")
      .def(
          "warn_after",
          [](Communicator& self, double seconds, const py::function& warn) {
            self.warn_after({duration_of(seconds), calling(warn)});
          },
          py::arg("seconds"), py::arg("warn"),
          "Call `warn` with a text when a call has waited for this time, or half of its timeout.")
      .def(
          "select",
          [](const Communicator& self, Collective collective, std::size_t bytes) {
            return std::string(self.select(collective, bytes).name());
          },
          py::arg("collective"), py::arg("bytes"), "Return the algorithm that \"auto\" selects.")
      .def(
          "run_later",
          [](Communicator& self, const py::function& call) {
            auto kept = std::make_shared<py::function>(call);
            auto begin = [given = kept.get()] {
              InterpreterLock lock;
              // The function, and the frames in its error, refer to the communicator, which keeps
              // this task. If either stayed in the task, the communicator could never be freed.
              const py::function function = std::move(*given);
              try {
                function();
              } catch (const py::error_already_set& error) {
                // The function stores its own errors. An error comes here only if there was no
                // memory for storing it.
                if (error.matches(PyExc_MemoryError)) throw std::bad_alloc();
                throw std::runtime_error(error.what());
              }
            };
            return self.submit(begin, kept);
          },
          py::arg("call"),
          "Run a Python function, which must raise nothing, on a thread of the communicator. The "
          "communicator's calls in the function run at once.")
      .def("mark_reported", &Communicator::mark_reported,
           "Record that the program has received the error of a submitted call, so that close() "
           "need not raise it again.")
      .def("collect", &Communicator::collect, "Release the objects that finished calls kept alive.")
      .def(
          "wait_all",
          [](Communicator& self) {
            InterpreterRelease release;
            self.wait_for_all(check_signals);
          },
          "Wait until all running calls are done.")
      .def_property_readonly("outstanding", &Communicator::outstanding,
                             "The number of running calls.")
      .def(
          "send",
          [](Communicator& self, const py::array& input, int dest, int tag, double timeout,
             bool async_op, const std::string& label) {
            return post(self, input, const_cast<void*>(input.data()), dest, tag, timeout, async_op,
                        true, label);
          },
          py::arg("input"), py::arg("dest"), py::arg("tag"), py::arg("timeout"),
          py::arg("async_op") = false, py::arg("label") = "",
          "`label`: the name of the element type, if not the dtype's; the same on both ranks.")
      .def(
          "recv",
          [](Communicator& self, py::array output, int source, int tag, double timeout,
             bool async_op, const std::string& label) {
            return post(self, output, output.mutable_data(), source, tag, timeout, async_op, false,
                        label);
          },
          py::arg("output"), py::arg("source"), py::arg("tag"), py::arg("timeout"),
          py::arg("async_op") = false, py::arg("label") = "", "`label`: as in send().")
      .def(
          "all_reduce",
          [](Communicator& self, const py::array& input, py::array output, const std::string& op,
             const Named& algorithm, bool reproducible, double timeout, bool async_op,
             std::optional<std::vector<std::int64_t>> shape, const std::string& label) {
            Array array = array_of(input, output);
            if (shape) array.shape = std::move(*shape);
            if (!label.empty()) array.type = label;
            Reducing reducing = reducing_of(input.dtype(), op);
            reducing.reproducible = reproducible;
            const Algorithm& how =
                algorithm_of(self, Collective::all_reduce, algorithm, bytes_of(input));
            return make_call(self, {input, output}, timeout, async_op,
                             self.prepare(how, array, 0, &reducing));
          },
          py::arg("input"), py::arg("output"), py::arg("op"), py::arg("algorithm"),
          py::arg("reproducible"), py::arg("timeout"), py::arg("async_op") = false,
          py::arg("shape") = py::none(), py::arg("label") = "",
          "`shape`: the shape on which the ranks must agree, if not the input's; -2 separates the "
          "shapes of several arrays. `label`: the name of the element type, if not the dtype's.")
      .def(
          "reduce",
          [](Communicator& self, const py::array& input, std::optional<py::array> output,
             const std::string& op, int root, const Named& algorithm, double timeout,
             bool async_op) {
            check_root(root, self.size());
            Ends ends{input, output};
            auto items = static_cast<std::size_t>(input.size());
            Array array = array_of(ends, items, self.rank() == root ? items : 0);
            const Algorithm& how =
                algorithm_of(self, Collective::reduce, algorithm, bytes_of(input));
            Reducing reducing = reducing_of(input.dtype(), op);
            return make_call(self, ends, timeout, async_op,
                             self.prepare(how, array, root, &reducing));
          },
          py::arg("input"), py::arg("output"), py::arg("op"), py::arg("root"), py::arg("algorithm"),
          py::arg("timeout"), py::arg("async_op") = false)
      .def(
          "reduce_scatter",
          [](Communicator& self, const py::array& input, py::array output, const std::string& op,
             const Named& algorithm, double timeout, bool async_op) {
            Array array =
                array_of_parts({input, output}, Collective::reduce_scatter,
                               static_cast<std::size_t>(output.size()), self.rank(), self.size());
            Reducing reducing = reducing_of(input.dtype(), op);
            const Algorithm& how =
                algorithm_of(self, Collective::reduce_scatter, algorithm, bytes_of(input));
            return make_call(self, {input, output}, timeout, async_op,
                             self.prepare(how, array, 0, &reducing));
          },
          py::arg("input"), py::arg("output"), py::arg("op"), py::arg("algorithm"),
          py::arg("timeout"), py::arg("async_op") = false)
      .def(
          "scan",
          [](Communicator& self, const py::array& input, std::optional<py::array> output,
             const std::string& op, bool exclusive, const Named& algorithm, double timeout,
             bool async_op) {
            const Collective collective = exclusive ? Collective::exscan : Collective::scan;
            Ends ends{input, output};
            auto items = static_cast<std::size_t>(input.size());
            Array array = array_of(ends, items, exclusive && self.rank() == 0 ? 0 : items);
            const Algorithm& how = algorithm_of(self, collective, algorithm, bytes_of(input));
            Reducing reducing = reducing_of(input.dtype(), op);
            return make_call(self, ends, timeout, async_op, self.prepare(how, array, 0, &reducing));
          },
          py::arg("input"), py::arg("output"), py::arg("op"), py::arg("exclusive"),
          py::arg("algorithm"), py::arg("timeout"), py::arg("async_op") = false,
          "For a mean, return sums, which the caller divides.")
      .def(
          "broadcast",
          [](Communicator& self, const py::array& input, py::array output, int root,
             const Named& algorithm, double timeout, bool async_op, const std::string& label) {
            check_root(root, self.size());
            Array array = array_of(input, output);
            if (!label.empty()) array.type = label;
            const Algorithm& how =
                algorithm_of(self, Collective::broadcast, algorithm, bytes_of(input));
            return make_call(self, {input, output}, timeout, async_op,
                             self.prepare(how, array, root, nullptr));
          },
          py::arg("input"), py::arg("output"), py::arg("root"), py::arg("algorithm"),
          py::arg("timeout"), py::arg("async_op") = false, py::arg("label") = "",
          "`label`: the name of the element type, if not the dtype's.")
      .def(
          "move_parts",
          [](Communicator& self, Collective collective, std::optional<py::array> input,
             std::optional<py::array> output, std::size_t count, std::vector<std::int64_t> shape,
             int root, const Named& algorithm, double timeout, bool async_op,
             const std::string& label) {
            check_root(root, self.size());
            Ends ends{input, output};
            int played = (self.rank() - root + self.size()) % self.size();
            Array array = array_of_parts(ends, collective, count, played, self.size());
            array.shape = std::move(shape);
            if (!label.empty()) array.type = label;
            std::size_t bytes = static_cast<std::size_t>(self.size()) * count * array.item;
            const Algorithm& how = algorithm_of(self, collective, algorithm, bytes);
            return make_call(self, ends, timeout, async_op,
                             self.prepare(how, array, root, nullptr));
          },
          py::arg("collective"), py::arg("input"), py::arg("output"), py::arg("count"),
          py::arg("shape"), py::arg("root"), py::arg("algorithm"), py::arg("timeout"),
          py::arg("async_op") = false, py::arg("label") = "",
          "Gather, scatter, all_gather or all_to_all with parts of `count` items. The ranks must "
          "agree on `shape`. `label`: the name of the element type, if not the dtype's.")
      .def(
          "move_ragged",
          [](Communicator& self, Collective collective, std::optional<py::array> input,
             std::optional<py::array> output, const std::vector<std::size_t>& counts,
             std::vector<std::int64_t> shape, int root, const Named& algorithm, double timeout,
             bool async_op) {
            check_root(root, self.size());
            if (static_cast<int>(counts.size()) != self.size()) {
              throw std::invalid_argument("there must be one count for each rank");
            }
            if (!in_parts(collective) || collective == Collective::all_to_all) {
              throw std::invalid_argument("move_ragged supports gather, scatter and all_gather");
            }
            int played = (self.rank() - root + self.size()) % self.size();
            auto items = [&](int chunks) {
              std::size_t own = counts[static_cast<std::size_t>(self.rank())];
              return chunks == 0 ? 0 : chunks == 1 ? own : sum(counts);
            };
            Ends ends{input, output};
            Array array =
                array_of(ends, items(input_chunks(collective, self.size(), played, self.size())),
                         items(output_chunks(collective, self.size(), played, self.size())));
            array.shape = std::move(shape);
            const Algorithm& how =
                algorithm_of(self, collective, algorithm, sum(counts) * array.item);
            return make_call(self, ends, timeout, async_op, self.prepare(how, array, counts, root));
          },
          py::arg("collective"), py::arg("input"), py::arg("output"), py::arg("counts"),
          py::arg("shape"), py::arg("root"), py::arg("algorithm"), py::arg("timeout"),
          py::arg("async_op") = false,
          "Gather, scatter or all_gather with parts of different sizes. `counts`: items by rank.")
      .def(
          "all_to_all_ragged",
          [](Communicator& self, const py::array& input, py::array output,
             const std::vector<std::size_t>& input_counts,
             const std::vector<std::size_t>& output_counts, std::vector<std::int64_t> shape,
             double timeout, bool async_op) {
            if (static_cast<int>(input_counts.size()) != self.size() ||
                static_cast<int>(output_counts.size()) != self.size()) {
              throw std::invalid_argument("there must be one count for each rank");
            }
            auto own = static_cast<std::size_t>(self.rank());
            if (input_counts[own] != output_counts[own]) {
              throw std::invalid_argument(
                  "a rank's input and output counts for itself must be equal");
            }
            Ends ends{input, output};
            Array array = array_of(ends, sum(input_counts), sum(output_counts));
            array.shape = std::move(shape);
            return make_call(self, ends, timeout, async_op,
                             self.prepare_all_to_all(array, input_counts, output_counts));
          },
          py::arg("input"), py::arg("output"), py::arg("input_counts"), py::arg("output_counts"),
          py::arg("shape"), py::arg("timeout"), py::arg("async_op") = false)
      .def(
          "empty",
          [](Communicator& self, const std::vector<py::ssize_t>& shape, const py::dtype& dtype,
             bool result) {
            return new_array(self.group().arena(), dtype.ptr(), static_cast<int>(shape.size()),
                             shape.data(), result ? kSharedResultFrom : 0);
          },
          py::arg("shape"), py::arg("dtype"), py::arg("result") = false,
          "Return a new array, which other ranks of the host can map if the arena has free "
          "memory. `result`: only if the array is large enough for that to be faster.")
      .def(
          "barrier",
          [](Communicator& self, double timeout, bool async_op) {
            return make_call(self, {}, timeout, async_op, self.prepare_barrier());
          },
          py::arg("timeout"), py::arg("async_op") = false);

  m.def(
      "all_reduce_together",
      [](const std::vector<std::shared_ptr<Communicator>>& communicators,
         const std::vector<py::array>& inputs, std::vector<py::array> outputs,
         const std::string& op, const Named& algorithm, double timeout) {
        if (communicators.empty() || inputs.size() != communicators.size() ||
            outputs.size() != communicators.size()) {
          throw std::invalid_argument(
              "there must be one input and one output for each communicator");
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
        const Algorithm& how =
            algorithm_of(*pointers[0], Collective::all_reduce, algorithm, bytes_of(inputs[0]));
        Waiting waiting = waiting_for(timeout);
        InterpreterRelease release;
        for (Communicator* communicator : pointers) communicator->wait_for_tasks(waiting.interrupt);
        Communicator::all_reduce_together(pointers, arrays, reducing, how, waiting);
      },
      py::arg("communicators"), py::arg("inputs"), py::arg("outputs"), py::arg("op"),
      py::arg("algorithm"), py::arg("timeout"),
      "Run the all_reduce of every rank of a group on the calling thread.");
}

}  // namespace pycollective
