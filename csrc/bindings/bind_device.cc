#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/communicator.h"
#include "bindings/dtypes.h"
#include "bindings/errors.h"
#include "cuda/device.h"
#include "device/call_matcher.h"
#include "device/emulated.h"
#include "support/interpreter_release.h"
#include "transport/thread.h"

namespace py = pybind11;

namespace pycollective {
namespace {

using device::Caller;
using device::CallMatcher;
using device::EmulatedRuntime;
using device::Event;
using device::Operation;
using device::Runtime;
using device::Stream;
using Released = py::call_guard<InterpreterRelease>;
using Address = std::uintptr_t;  // of device memory
using Counts = std::optional<std::vector<std::size_t>>;
using Placed = std::tuple<Address, std::size_t, std::size_t>;  // address, items, offset

void* memory(Address address) { return reinterpret_cast<void*>(address); }

// Returns the places of the parts in this rank's buffer, which has `chunks` parts. Chunk i is the
// part of the rank that has number i in the schedule, whose root is rank 0.
std::vector<Part> parts_of(int chunks, const Counts& counts, std::size_t count, int rank, int size,
                           int root) {
  std::vector<std::size_t> each =
      counts.value_or(std::vector<std::size_t>(static_cast<std::size_t>(size), count));
  if (each.size() != static_cast<std::size_t>(size)) {
    throw std::invalid_argument("there must be one count for each rank");
  }
  if (chunks == 1) return {{0, each[static_cast<std::size_t>(rank)]}};
  std::vector<Part> parts = contiguous_parts(each);
  std::rotate(parts.begin(), parts.begin() + root, parts.end());
  return parts;
}

void call(Caller& self, const std::shared_ptr<Operation>& operation, Collective collective,
          Address input, Address output, std::size_t count, std::vector<std::int64_t> shape,
          const py::dtype& dtype, const std::optional<std::string>& op, int root,
          const Named& named, bool reproducible, const Counts& sent, const Counts& received,
          int device, Stream stream, std::optional<Stream> after, bool later, bool timed,
          double timeout) {
  Communicator& communicator = self.communicator();
  int rank = communicator.rank(), size = communicator.size();
  check_root(root, size);
  operation->root = root;
  operation->after = after;
  operation->timed = timed;
  operation->shape.count = count;
  operation->shape.item = static_cast<std::size_t>(dtype.itemsize());
  operation->share = {device,
                      stream,
                      static_cast<std::byte*>(memory(input)),
                      static_cast<std::byte*>(memory(output)),
                      {},
                      {}};
  if (op) std::tie(operation->shape.dtype, operation->shape.op) = reduction_of(dtype, *op);

  bool parts = in_parts(collective);
  std::size_t bytes = count * operation->shape.item * (parts ? static_cast<std::size_t>(size) : 1);
  const auto* name = std::get_if<std::string>(&named);
  bool is_auto = name && *name == "auto";
  const Algorithm& algorithm = is_auto ? select(collective, bytes, size, device::kTransport)
                                       : algorithm_of(communicator, collective, named, bytes);
  // Reproducible halves must be rounded like those of a schedule, so a schedule is used.
  bool rounds = reproducible && op && reduction(operation->shape.dtype, operation->shape.op).half;
  bool directly = collective == Collective::all_reduce && !rounds &&
                  (is_auto || &algorithm == &direct_all_reduce());
  if (!directly) {
    operation->algorithm = &algorithm;
    operation->kept = algorithm.weak_from_this().lock();
  }
  if (parts) {
    int played = (rank - root + size) % size;
    operation->share.input_parts =
        parts_of(input_chunks(collective, size, played, size), sent, count, rank, size, root);
    operation->share.output_parts =
        parts_of(output_chunks(collective, size, played, size), received, count, rank, size, root);
  }

  Array array;
  array.shape = std::move(shape);
  array.type = name_of(dtype);
  CallRecord& record = operation->record = record_of(algorithm, array, root);
  set_name(record.collective, std::string(to_string(collective)) + " on GPUs");
  if (is_auto) set_name(record.algorithm, "auto");
  if (op) set_name(record.op, *op);
  if (reproducible) record.name_reproducible();
  record.seal();

  Waiting waiting = waiting_for(timeout);
  operation->began = waiting.began;
  operation->deadline = waiting.deadline;
  InterpreterRelease release;
  self.call(operation, later, waiting.interrupt);
}

void pack(Runtime& self, Address packed, const py::dtype& packed_type,
          const std::vector<Placed>& pieces, const py::dtype& piece_type, double scale,
          bool unpacks, int device, Stream stream) {
  std::vector<device::Piece> all;
  for (auto [address, count, offset] : pieces) all.push_back({memory(address), count, offset});
  DType packed_as = packable(packed_type), pieces_as = packable(piece_type);
  InterpreterRelease release;
  if (unpacks) {
    self.unpack(memory(packed), packed_as, all, pieces_as, scale, device, stream);
  } else {
    self.pack(memory(packed), packed_as, all, pieces_as, scale, device, stream);
  }
}

}  // namespace

void bind_device(py::module_& m) {
  py::class_<Event>(m, "Event", "A point in a stream. It occurs when all earlier work is done.");

  py::class_<Runtime, std::shared_ptr<Runtime>>(m, "Runtime",
                                                "The operations of devices that calls need.")
      .def("reaches", &Runtime::reaches, py::arg("device"), py::arg("other"), Released(),
           "Return True if kernels on one device can access the other's memory.")
      .def(
          "mark",
          [](Runtime& self, int device, Stream stream, bool timed) {
            std::unique_ptr<Event> made = self.event(device, timed);
            self.record(*made, device, stream);
            return made;
          },
          py::arg("device"), py::arg("stream"), py::arg("timed") = false, Released(),
          "Record an event in a stream, with the time of its occurrence if `timed`.")
      .def("wait", &Runtime::wait, py::arg("event").none(false), py::arg("device"),
           py::arg("stream"), Released(), "Make the stream's later work wait for an event.")
      .def("over", &Runtime::over, py::arg("event").none(false), Released(),
           "Return True if an event has occurred.")
      .def(
          "copy",
          [](Runtime& self, Address target, int target_device, Address source, int source_device,
             std::size_t bytes, Stream stream) {
            self.copy(memory(target), target_device, memory(source), source_device, bytes, stream);
          },
          py::arg("target"), py::arg("target_device"), py::arg("source"), py::arg("source_device"),
          py::arg("bytes"), py::arg("stream"), Released(),
          "Copy bytes, on a stream of the target's device.")
      .def("pack", &pack, py::arg("packed"), py::arg("packed_dtype"), py::arg("pieces"),
           py::arg("piece_dtype"), py::arg("scale") = 1.0, py::arg("unpacks") = false,
           py::arg("device") = 0, py::arg("stream") = 0,
           "Pack pieces (address, items, offset in items) into one array, or unpack them.");

  m.def(
      "cuda_runtime",
      []() -> std::shared_ptr<Runtime> {
        if (!cuda::built()) return nullptr;
        // The runtime is never destroyed.
        return {&cuda::runtime(), [](Runtime*) {}};
      },
      "Return the runtime of CUDA devices, or None if this build has no CUDA part.");

  py::class_<EmulatedRuntime, Runtime, std::shared_ptr<EmulatedRuntime>>(
      m, "EmulatedRuntime",
      "Emulated devices in host memory, for tests. Work is executed in any order that streams and "
      "events allow.")
      .def(py::init<std::vector<int>, std::uint64_t>(), py::arg("cliques"), py::arg("seed") = 0,
           "`cliques`: by device, its clique, whose devices reach each other's memory.")
      .def(
          "own",
          [](EmulatedRuntime& self, int device, Address address, std::size_t bytes) {
            self.own(device, memory(address), bytes);
          },
          py::arg("device"), py::arg("address"), py::arg("bytes"),
          "Declare the device of memory that was not allocated here.")
      .def("run", &EmulatedRuntime::run, Released(), "Execute all work.")
      .def("hold", &EmulatedRuntime::hold, py::arg("on"), "While on, execute work in run() only.")
      .def("fail_after", &EmulatedRuntime::fail_after, py::arg("calls"),
           "Let the call after this number of calls fail.")
      .def("break_device", &EmulatedRuntime::break_device, py::arg("device"),
           "Let all later calls for this device fail.")
      .def("lose_wait_after", &EmulatedRuntime::lose_wait_after, py::arg("waits"),
           "Ignore the wait after this number of waits.")
      .def_property_readonly(
          "counts",
          [](EmulatedRuntime& self) {
            EmulatedRuntime::Counts counts = self.counts();
            return std::map<std::string, int>{{"allocations", counts.allocations},
                                              {"frees", counts.frees},
                                              {"copies", counts.copies},
                                              {"combinations", counts.combinations},
                                              {"packs", counts.packs},
                                              {"records", counts.records},
                                              {"waits", counts.waits}};
          },
          "The number of calls of each kind.");

  py::class_<Operation, std::shared_ptr<Operation>>(m, "Operation", "A rank's call on a device.")
      .def(py::init())
      .def_property_readonly(
          "number", [](const Operation& self) { return self.record.number; },
          "The number of the call on its rank.");

  py::class_<CallMatcher, std::shared_ptr<CallMatcher>>(
      m, "CallMatcher",
      "Matches the calls on device arrays of ranks that are threads of this process.")
      .def(py::init([](std::shared_ptr<ThreadGroup> group, std::shared_ptr<Runtime> runtime) {
             return std::make_shared<CallMatcher>(std::move(group), std::move(runtime));
           }),
           py::arg("group").none(false), py::arg("runtime").none(false));

  py::class_<Caller>(m, "Caller", "One rank's interface to a CallMatcher.")
      .def(py::init<Communicator&, std::shared_ptr<CallMatcher>>(), py::arg("communicator"),
           py::arg("matcher").none(false), py::keep_alive<1, 2>())
      .def("call", &call, py::arg("operation").none(false), py::arg("collective"), py::arg("input"),
           py::arg("output"), py::arg("count"), py::arg("shape"), py::arg("dtype"), py::arg("op"),
           py::arg("root"), py::arg("algorithm"), py::arg("reproducible"), py::arg("sent"),
           py::arg("received"), py::arg("device"), py::arg("stream"), py::arg("after"),
           py::arg("later"), py::arg("timed"), py::arg("timeout"),
           "Call a collective on arrays given by their addresses. The call runs on `stream`, after "
           "the present work of the stream `after`. `count`: items of an array, or of a part if "
           "chunks are ranks' parts; `sent` and `received`: items by rank, if they differ. Returns "
           "when all ranks have called, or at once if `later`. `timed`: record the call's times.")
      .def("times", &Caller::times, py::arg("operation").none(false), py::arg("first").none(false),
           Released(),
           "Return the times at which the device began and finished a timed call, in seconds after "
           "the event `first`; None unless the call is over.")
      .def(
          "finish",
          [](Caller& self, Operation& operation) {
            InterpreterRelease release;
            self.finish(operation, check_signals);
          },
          py::arg("operation"),
          "Wait until all ranks have called, or until the call's deadline has passed.")
      .def(
          "over", [](Caller& self, const Operation& operation) { return self.over(operation); },
          py::arg("operation"), Released(),
          "Return True if no device uses the call's arrays any more. A failed device fails the "
          "group.")
      .def(
          "order",
          [](Caller& self, const Operation& operation, Stream stream) {
            if (!operation.is_enqueued())
              throw std::logic_error("not all ranks have come to the call");
            self.order(operation, stream);
          },
          py::arg("operation"), py::arg("stream"), Released(),
          "Make a stream of the device wait for a call that all ranks have called.")
      .def("leave", &Caller::leave, Released(),
           "Fail the group if this rank has calls that some rank has not called.");
}

}  // namespace pycollective
