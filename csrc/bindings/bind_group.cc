#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/errors.h"
#include "support/cores.h"
#include "support/interpreter_release.h"
#include "support/parallel.h"
#include "support/tuning.h"
#include "transport/mixed.h"
#include "transport/shm.h"
#include "transport/tcp.h"
#include "transport/thread.h"

namespace py = pybind11;

namespace pycollective {

namespace {

std::atomic<bool> exits_in_failure{false};

// Returns a rank of the group. Throws for other numbers, which would lead out of its tables.
int among(const Group& group, int rank) {
  if (rank < 0 || rank >= group.size()) {
    throw std::invalid_argument("rank " + std::to_string(rank) + " is not among the " +
                                std::to_string(group.size()) + " ranks");
  }
  return rank;
}

}  // namespace

void bind_group(py::module_& m) {
#ifdef __GLIBC__
  // Registered when the module is loaded, so it runs after the handlers that other libraries
  // register later.
  on_exit(
      [](int status, void*) {
        if (status != 0 || !exits_in_failure.load()) return;
        std::fflush(nullptr);
        _exit(1);
      },
      nullptr);
#endif
  m.def(
      "exit_in_failure", [] { exits_in_failure.store(true); },
      "Make the process, which is ending, exit with status 1 instead of 0.");

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
          [](Group& group, const std::string& message, bool peer_lost, std::vector<int> ranks,
             const std::optional<std::string>& call) {
            std::sort(ranks.begin(), ranks.end());
            ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
            if (!ranks.empty() && (ranks.front() < 0 || ranks.back() >= group.size())) {
              throw std::invalid_argument("a rank is not in the group");
            }
            std::vector<std::string> calls;
            if (call) calls.push_back(*call);
            group.fail({peer_lost ? FailureKind::peer_lost : FailureKind::aborted, message,
                        std::move(ranks), std::move(calls)});
          },
          py::arg("message"), py::arg("peer_lost") = false, py::arg("ranks") = std::vector<int>(),
          py::arg("call") = py::none(), py::call_guard<InterpreterRelease>(),
          "Fail every rank's current or next call with AbortedError or PeerLostError, which gets "
          "`ranks` and `call`.")
      .def("fail_as", &Group::fail_as, py::arg("whole"), py::arg("members"),
           py::call_guard<InterpreterRelease>(),
           "Fail this group, which has the ranks `members` of `whole`, in the same way if `whole` "
           "has failed.")
      .def_property_readonly(
          "failure",
          [](const Group& group) -> std::optional<std::string> {
            auto failure = group.failure();
            if (!failure) return {};
            return std::string(failure->what());
          },
          "The reason of the group's failure, or None.")
      .def(
          "check",
          [](const Group& group) {
            if (auto failure = group.failure()) throw *failure;
          },
          "Raise the group's failure, if it has failed.")
      .def(
          "leave", [](Group& group, int rank) { group.leave(among(group, rank)); }, py::arg("rank"),
          py::call_guard<InterpreterRelease>(), "Leave the group. Peers do not lose the rank.")
      .def(
          "close", [](Group& group, int rank) { group.close(among(group, rank)); }, py::arg("rank"),
          py::call_guard<InterpreterRelease>(),
          "Leave the group as this process's rank. Raise MismatchError if ranks' calls differed "
          "and no call of this rank has raised it.")
      .def("abandon", &Group::abandon,
           "Drop the group without notifying the peers, in a forked child.")
      .def_property_readonly("transport", &Group::transport, "The name of the transport.")
      .def_property_readonly("is_oversubscribed", &Group::is_oversubscribed,
                             "True if this rank's host has more ranks than usable cores.")
      .def_property_readonly(
          "hosts", &Group::hosts,
          "The number of each rank's host. Ranks with the same number share memory.")
      .def(
          "calls", [](const Group& group, int rank) { return group.calls(among(group, rank)); },
          py::arg("rank"),
          "Return the number of collective calls that a rank has begun, as far as this rank knows.")
      .def("send_heartbeat", &Group::send_heartbeat,
           "Send a heartbeat with this rank's current call to the peers.")
      .def("silent", &Group::silent, py::arg("seconds"),
           "Return the ranks without a heartbeat for this many seconds, counted from the first one "
           "on.")
      .def(
          "address", [](const Group& group, int rank) { return group.address(among(group, rank)); },
          py::arg("rank"),
          "Return the address of a rank on another host, and an empty text for this host.")
      .def(
          "title", [](const Group& group, int rank) { return group.title(among(group, rank)); },
          py::arg("rank"), "Return the rank's name in messages, such as \"rank 1\".")
      .def(
          "set_titles",
          [](Group& group, const std::vector<std::string>& titles) {
            if (static_cast<int>(titles.size()) != group.size()) {
              throw std::invalid_argument("there must be a title for every rank");
            }
            group.set_titles(titles);
          },
          py::arg("titles"), "Set the ranks' names in messages.")
      .def(
          "describe",
          [](const Group& group, std::optional<int> rank) {
            if (rank && (*rank < 0 || *rank >= group.size())) {
              throw std::invalid_argument("a rank is not in the group");
            }
            return rank ? group.describe(*rank) : group.describe_ranks();
          },
          py::arg("rank") = py::none(),
          "Describe the current activity of a rank, by default of all ranks.");

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
      .def_static("create", &ShmGroup::create, py::arg("size"), py::arg("arena") = kArenaBytes,
                  "Create a group's memory, with `arena` bytes of address space for the arrays of "
                  "each rank.")
      .def_static("open", &ShmGroup::open, py::arg("descriptor"),
                  "Open the group's memory behind a descriptor, which is duplicated.")
      .def_property_readonly("descriptor", &ShmGroup::descriptor)
      .def("join", &ShmGroup::join, py::arg("rank"), "Join the group as this rank.")
      .def("follow", &ShmGroup::follow, py::arg("other"),
           "From now on, a process that the other group loses is lost to this group too.")
      .def(
          "is_in", [](const ShmGroup& group, int rank) { return group.is_in(among(group, rank)); },
          py::arg("rank"), "Return True if a rank has joined and not left.")
      .def_property_readonly(
          "all_read_remotely", &ShmGroup::all_read_remotely,
          "True if each rank can read the ordinary memory of all ranks by a system "
          "call (process_vm_readv).")
      .def_property_readonly(
          "copy_way",
          [](const ShmGroup& group) {
            constexpr const char* kNames[] = {"plain", "past_cache", "remote_read"};
            return kNames[static_cast<int>(group.copy_way())];
          },
          "The way of this rank's array to its peers in its last long call (CopyWay).")
      .def_property_readonly(
          "needing_fences", &ShmGroup::needing_fences,
          "The ranks whose wake-up needs a fence: they have not joined, or have no membarrier.");

  m.def("usable_cores", &usable_cores,
        "Return the number of cores in the affinity, limited by the control groups' CPU quota.");
  m.def("threads", &threads,
        "Return the maximum number of threads of an all-reduce among ranks of one process.");
  m.def("set_threads", &set_threads, py::arg("count"),
        "Set the maximum number of threads of an all-reduce among ranks of one process.");
  m.def("yield_or_change_core", &yield_or_change_core,
        "Yield; return True if the thread moved to another core because others use this one.");
  m.def("quota_of_cores", &quota_of_cores, py::arg("root"),
        "Return the cores that the CPU quota of the control groups below `root` allows, or 0.");

  py::class_<TcpGroup, Group, std::shared_ptr<TcpGroup>>(
      m, "TcpGroup", "One rank of a group of processes on any hosts, over TCP.")
      .def(py::init([](int rank, const std::vector<std::vector<int>>& streams,
                       const std::vector<int>& pipes) {
             return std::make_shared<TcpGroup>(rank, streams, pipes);
           }),
           py::arg("rank"), py::arg("streams"), py::arg("pipes") = std::vector<int>(),
           "`streams` has each rank's connected, authenticated sockets: the control connection, "
           "and one or more for messages. The sockets are duplicated.")
      .def_property_readonly("rank", &TcpGroup::rank);

  py::class_<MixedGroup, Group, std::shared_ptr<MixedGroup>>(
      m, "MixedGroup", "One rank of a group in which some ranks share a host.")
      .def(
          py::init<int, const std::vector<std::vector<int>>&, const std::vector<int>&,
                   std::shared_ptr<ShmGroup>, std::vector<int>>(),
          py::arg("rank"), py::arg("streams"), py::arg("pipes"), py::arg("memory"),
          py::arg("hosts"),
          "Like TcpGroup, but ranks of this host need the control connection only. `memory` is the "
          "group of this host's ranks, which this rank has joined.");
}

}  // namespace pycollective
