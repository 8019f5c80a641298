#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "algorithms/algorithms.h"
#include "algorithms/hierarchical.h"
#include "bindings/bindings.h"
#include "schedule/tabulated.h"

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
  throw std::invalid_argument("no " + std::string(to_string(collective)) +
                              " algorithm is called '" + name + "'; there are: " + known);
}

void check_size(int size) {
  if (size < 1)
    throw std::invalid_argument("a group has at least 1 rank, not " + std::to_string(size));
}

}  // namespace

void bind_schedule(py::module_& m) {
  py::enum_<Verb>(m, "Verb", "What a step does.")
      .value("send", Verb::send)
      .value("recv", Verb::recv)
      .value("recv_reduce", Verb::recv_reduce)
      .value("copy", Verb::copy)
      .value("reduce", Verb::reduce);
  py::enum_<Buffer>(m, "Buffer", "The buffer that a span lies in.")
      .value("input", Buffer::input)
      .value("output", Buffer::output)
      .value("scratch", Buffer::scratch);
  py::enum_<Collective> collectives(m, "Collective", "What a schedule promises.");
  for (int i = 0; i < kCollectives; ++i) {
    auto collective = static_cast<Collective>(i);
    collectives.value(to_string(collective).data(), collective);
  }

  py::class_<Span>(m, "Span", "Chunks first to first + count of a buffer.")
      .def(py::init<Buffer, int, int>(), py::arg("buffer") = Buffer::input, py::arg("first") = 0,
           py::arg("count") = 0)
      .def_readwrite("buffer", &Span::buffer)
      .def_readwrite("first", &Span::first)
      .def_readwrite("count", &Span::count);
  py::class_<Step>(m, "Step", "One verb of one rank.")
      .def(py::init([](Verb verb, int peer, Span source, Span target, bool completes) {
             return Step{verb, peer, source, target, completes};
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
      m, "Algorithm", "A schedule that is proved, and can be run by its number of ranks.")
      .def(py::init<std::string, Schedule>(), py::arg("name"), py::arg("schedule"),
           py::call_guard<py::gil_scoped_release>())
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
      py::arg("collective"), "Names of the algorithms of a collective, the default first.");
  m.def(
      "make_schedule",
      [](Collective collective, const std::string& algorithm, int size) {
        check_size(size);
        const Algorithm& found = algorithm_of(collective, algorithm);
        py::gil_scoped_release release;
        return make_schedule(found, size);
      },
      py::arg("collective"), py::arg("algorithm"), py::arg("size"),
      "The steps of every rank for a group of `size` ranks.");
  m.def(
      "make_hierarchical",
      [](const std::vector<int>& hosts) {
        return make_schedule(Hierarchical(hosts), static_cast<int>(hosts.size()));
      },
      py::arg("hosts"), py::call_guard<py::gil_scoped_release>(),
      "The hierarchical all-reduce for ranks on these hosts, numbered from 0.");
  m.def("verify", &verify, py::arg("schedule"), py::arg("in_place"), py::arg("filled") = 0,
        py::call_guard<py::gil_scoped_release>(),
        "The first thing that is wrong with a schedule, or an empty string.");
  m.def("prove", &prove, py::arg("schedule"), py::call_guard<py::gil_scoped_release>(),
        "verify() out of place and in place, for every number of filled chunks.");
}

}  // namespace pycollective
