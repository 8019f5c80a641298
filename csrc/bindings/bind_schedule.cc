#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <variant>

#include "algorithms/algorithms.h"
#include "algorithms/hierarchical.h"
#include "bindings/bindings.h"
#include "schedule/simulate.h"
#include "schedule/tabulated.h"
#include "support/interpreter_release.h"
#include "support/tuning.h"

namespace py = pybind11;

namespace pycollective {
namespace {

const Algorithm& algorithm_of(Collective collective, const std::string& name) {
  if (const Algorithm* found = find_algorithm(collective, name)) return *found;
  std::string known;
  for (const Algorithm* algorithm : all_algorithms()) {
    if (algorithm->collective() != collective) continue;
    append_name(known, algorithm->name());
  }
  throw std::invalid_argument(
      "no " + std::string(to_string(collective)) + " algorithm is called '" + name +
      "'; choose one of: " + known +
      (name == "hierarchical" ? ", or algorithms.hierarchical(hosts)" : ""));
}

// An algorithm by name, or a table.
using Named = std::variant<std::string, const Schedule*>;

// Calls work(algorithm).
template <class Work>
auto with_algorithm(Collective collective, const Named& named, int size, Work work) {
  if (const auto* name = std::get_if<std::string>(&named)) {
    return work(algorithm_of(collective, *name));
  }
  const Schedule& schedule = *std::get<const Schedule*>(named);
  if (schedule.steps.size() != static_cast<std::size_t>(size)) {
    throw std::invalid_argument("the schedule is for " + std::to_string(schedule.steps.size()) +
                                " ranks, not for " + std::to_string(size));
  }
  return work(ScheduleView(schedule));
}

using PythonWatch = std::optional<py::function>;

// Checks Ctrl-C and reports the progress to Python. Called without the GIL. `report` must outlive
// the result, unless it is empty.
Watch watch_of(const PythonWatch& report) {
  const py::function* function = report ? &*report : nullptr;
  return [function](double share) {
    py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (function) (*function)(share);
  };
}

using LinkTuple = std::tuple<double, double, double, bool, bool, bool>;

Cluster cluster_of(int ranks, std::vector<std::vector<int>> places,
                   const std::vector<LinkTuple>& links, double reduce_rate, double copy_rate,
                   double call_overhead, int cores) {
  Cluster cluster{ranks, std::move(places), {}, reduce_rate, copy_rate, call_overhead, cores};
  for (const auto& [latency, bandwidth, overhead, sends, receives, shared] : links) {
    cluster.links.push_back({latency, bandwidth, overhead, sends, receives, shared});
  }
  return cluster;
}

// With many more ranks, the number of a step would overflow an int.
constexpr int kMostRanks = 1 << 24;

void check_size(int size) {
  if (size < 1)
    throw std::invalid_argument("a group has at least 1 rank, not " + std::to_string(size));
  if (size > kMostRanks) {
    throw std::invalid_argument("schedules are for at most " + std::to_string(kMostRanks) +
                                " ranks, not " + std::to_string(size));
  }
}

}  // namespace

void bind_schedule(py::module_& m) {
  py::enum_<Verb>(m, "Verb", "The action of a step.")
      .value("send", Verb::send)
      .value("recv", Verb::recv)
      .value("recv_reduce", Verb::recv_reduce)
      .value("copy", Verb::copy)
      .value("reduce", Verb::reduce);
  py::enum_<Buffer>(m, "Buffer", "The buffer of a span.")
      .value("input", Buffer::input)
      .value("output", Buffer::output)
      .value("scratch", Buffer::scratch);
  py::enum_<Collective> collectives(m, "Collective", "The collective that a schedule implements.");
  for (int i = 0; i < kCollectives; ++i) {
    auto collective = static_cast<Collective>(i);
    collectives.value(to_string(collective).data(), collective);
  }

  py::class_<Span>(m, "Span", "Chunks `first` to `first + count - 1` of a buffer.")
      .def(py::init<Buffer, int, int>(), py::arg("buffer") = Buffer::input, py::arg("first") = 0,
           py::arg("count") = 0)
      .def_readwrite("buffer", &Span::buffer)
      .def_readwrite("first", &Span::first)
      .def_readwrite("count", &Span::count)
      .def("__repr__", [](const Span& self) { return to_string(self); });
  py::class_<Step>(m, "Step", "One verb of one rank.")
      .def(py::init([](Verb verb, int peer, Span source, Span target, bool completes) {
             return Step{verb, completes, peer, source, target};
           }),
           py::arg("verb"), py::arg("peer") = -1, py::arg("source") = Span{},
           py::arg("target") = Span{}, py::arg("completes") = false)
      .def_readwrite("verb", &Step::verb)
      .def_readwrite("peer", &Step::peer)
      .def_readwrite("source", &Step::source)
      .def_readwrite("target", &Step::target)
      .def_readwrite("completes", &Step::completes)
      .def("__str__", [](const Step& step) { return to_string(step); })
      .def("__repr__", [](const Step& step) { return "<Step " + to_string(step) + ">"; });
  py::class_<Schedule>(m, "Schedule", "The steps of all ranks.")
      .def(py::init(
               [](Collective collective, int chunks, std::vector<std::vector<Step>> steps,
                  int scratch) { return Schedule{collective, chunks, std::move(steps), scratch}; }),
           py::arg("collective"), py::arg("chunks"), py::arg("steps"), py::arg("scratch") = 0)
      .def_readonly("collective", &Schedule::collective)
      .def_readonly("chunks", &Schedule::chunks)
      .def_readonly("scratch", &Schedule::scratch)
      .def_readonly("steps", &Schedule::steps);
  py::class_<TabulatedAlgorithm, std::shared_ptr<TabulatedAlgorithm>>(
      m, "Algorithm", "A proved schedule, which groups with its number of ranks can run.")
      .def(py::init([](const std::string& name, const Schedule& schedule) {
             InterpreterRelease release;
             return std::make_shared<TabulatedAlgorithm>(name, schedule, watch_of(std::nullopt));
           }),
           py::arg("name"), py::arg("schedule"))
      .def_property_readonly("name", &TabulatedAlgorithm::name)
      .def_property_readonly("schedule", &TabulatedAlgorithm::schedule);

  m.def(
      "algorithm_names",
      [](Collective collective) {
        std::vector<std::string> names;
        for (const Algorithm* algorithm : all_algorithms()) {
          if (algorithm->collective() == collective) names.emplace_back(algorithm->name());
        }
        return names;
      },
      py::arg("collective"), "Return the names of a collective's algorithms, the default first.");
  m.def(
      "make_schedule",
      [](Collective collective, const std::string& algorithm, int size) {
        check_size(size);
        const Algorithm& found = algorithm_of(collective, algorithm);
        InterpreterRelease release;
        return make_schedule(found, size);
      },
      py::arg("collective"), py::arg("algorithm"), py::arg("size"),
      "Return the steps of all ranks of a group of `size` ranks.");
  m.def(
      "make_hierarchical",
      [](const std::vector<int>& hosts) {
        return make_schedule(Hierarchical(hosts), static_cast<int>(hosts.size()));
      },
      py::arg("hosts"), py::call_guard<InterpreterRelease>(),
      "Return the hierarchical all-reduce. `hosts`: the host of each rank, numbered from 0.");
  m.def("verify", &verify, py::arg("schedule"), py::arg("in_place"), py::arg("filled") = 0,
        py::call_guard<InterpreterRelease>(),
        "Return the first error of a schedule, or an empty string.");
  m.def(
      "prove",
      [](const Schedule& schedule) {
        InterpreterRelease release;
        return prove(schedule, watch_of(std::nullopt));
      },
      py::arg("schedule"),
      "Run verify() out of place and in place, for every number of filled chunks.");
  m.def(
      "verify_many",
      [](Collective collective, const Named& algorithm, int size, bool marks,
         const PythonWatch& watch) {
        check_size(size);
        InterpreterRelease release;
        return with_algorithm(collective, algorithm, size, [&](const Algorithm& found) {
          return verify_by_fingerprints(found, size, marks ? Marks::checked : Marks::ignored,
                                        watch_of(watch));
        });
      },
      py::arg("collective"), py::arg("algorithm"), py::arg("size"), py::arg("marks") = true,
      py::arg("watch") = py::none(),
      "Return the first error of an algorithm for any number of ranks, by random fingerprints.");
  m.def(
      "simulate",
      [](Collective collective, const Named& algorithm, double bytes, double segment_bytes,
         int ranks, std::vector<std::vector<int>> places, const std::vector<LinkTuple>& links,
         double reduce_rate, double copy_rate, double call_overhead, int cores,
         const PythonWatch& watch) {
        check_size(ranks);
        Simulation simulation;
        {
          InterpreterRelease release;
          Cluster cluster = cluster_of(ranks, std::move(places), links, reduce_rate, copy_rate,
                                       call_overhead, cores);
          simulation = with_algorithm(collective, algorithm, ranks, [&](const Algorithm& found) {
            if (const auto* table = std::get_if<const Schedule*>(&algorithm)) {
              std::string problem = misfit(**table);
              if (!problem.empty()) throw std::invalid_argument(problem);
            }
            return simulate(found, cluster, bytes, segment_bytes, watch_of(watch));
          });
        }
        auto count = static_cast<py::ssize_t>(simulation.finish.size());
        return py::make_tuple(simulation.seconds,
                              py::array_t<double>(count, simulation.finish.data()),
                              simulation.bytes, simulation.messages, simulation.steps);
      },
      py::arg("collective"), py::arg("algorithm"), py::arg("bytes"), py::arg("segment_bytes"),
      py::arg("ranks"), py::arg("places"), py::arg("links"), py::arg("reduce_rate"),
      py::arg("copy_rate"), py::arg("call_overhead"), py::arg("cores"),
      py::arg("watch") = py::none(),
      "Return the seconds, the end of each rank, bytes and messages of each link, and the steps.");
  m.attr("SEGMENT_BYTES") = kSegmentBytes;
}

}  // namespace pycollective
