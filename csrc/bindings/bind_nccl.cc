#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

#include "bindings/bindings.h"
#include "nccl/communicator.h"
#include "support/interpreter_release.h"

namespace py = pybind11;

namespace pycollective {
namespace {

using nccl::Comm;
using nccl::Library;
using Released = py::call_guard<InterpreterRelease>;
using Address = std::uintptr_t;  // of device memory, a stream, or an object of NCCL

void* memory(Address address) { return reinterpret_cast<void*>(address); }
nccl::Stream stream(Address address) { return reinterpret_cast<nccl::Stream>(address); }

nccl::UniqueId unique_id_of(const std::string& bytes) {
  nccl::UniqueId id;
  if (bytes.size() != sizeof id.bytes) {
    throw std::invalid_argument("an NCCL unique id has " + std::to_string(sizeof id.bytes) +
                                " bytes, not " + std::to_string(bytes.size()));
  }
  std::memcpy(id.bytes, bytes.data(), bytes.size());
  return id;
}

using Number = std::optional<int>;

nccl::Options options_of(std::optional<bool> blocking, Number cga_cluster_size, Number min_ctas,
                         Number max_ctas, std::optional<bool> split_share) {
  constexpr int kUnset = nccl::Config::kUnset;
  return {blocking ? *blocking : kUnset, cga_cluster_size.value_or(kUnset),
          min_ctas.value_or(kUnset), max_ctas.value_or(kUnset),
          split_share ? *split_share : kUnset};
}

template <class Value>
void raise(const char* type, const char* message, const char* attribute, Value value) {
  py::object kind = py::module_::import("pycollective.errors").attr(type);
  py::object error = kind(message);
  error.attr(attribute) = value;
  PyErr_SetObject(kind.ptr(), error.ptr());
}

}  // namespace

void bind_nccl(py::module_& m) {
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const nccl::Error& failure) {
      raise("NcclError", failure.what(), "code", failure.code);
    } catch (const nccl::LoadError& failure) {
      raise("NcclNotFoundError", failure.what(), "is_too_old", failure.is_too_old);
    }
  });

  m.attr("IN_PROGRESS") = static_cast<int>(nccl::Result::in_progress);

  py::class_<Library, std::shared_ptr<Library>>(m, "Library", "A loaded NCCL library.")
      // Here and below, the GIL is released inside the function: with a call_guard, pybind11 would
      // register the new instance without the GIL.
      .def(py::init([](const std::string& name, bool loaded) {
             InterpreterRelease release;
             return Library::open(name, loaded);
           }),
           py::arg("name"), py::arg("loaded") = false)
      .def_property_readonly("version", &Library::version, "The version, e.g. 22703 for 2.27.3.")
      .def_property_readonly("version_text",
                             [](const Library& self) { return nccl::version_text(self.version()); })
      .def_property_readonly("path", &Library::path, "The path of the library's file.")
      .def("error_text", &Library::error_text, py::arg("code"))
      .def(
          "unique_id",
          [](const Library& self) {
            nccl::UniqueId id;
            {
              InterpreterRelease release;
              id = self.unique_id();
            }
            return py::bytes(id.bytes, sizeof id.bytes);
          },
          "Create the id with which all ranks of a new communicator call Comm().")
      .def("group_start", &Library::group_start, Released(),
           "Collect this thread's calls until group_end().")
      .def("group_end", &Library::group_end, Released(), "Make the collected calls.")
      .def(
          "mem_alloc",
          [](const Library& self, std::size_t size) {
            return reinterpret_cast<Address>(self.allocate(size));
          },
          py::arg("size"), Released(), "Allocate device memory that NCCL can register.")
      .def(
          "mem_free", [](const Library& self, Address a) { self.release(memory(a)); },
          py::arg("memory"), Released());

  py::class_<Comm>(m, "Comm", "One rank of a communicator of NCCL, on the current device.")
      .def(py::init([](std::shared_ptr<Library> library, const std::string& unique_id, int size,
                       int rank, std::optional<bool> blocking, Number cga_cluster_size,
                       Number min_ctas, Number max_ctas, std::optional<bool> split_share) {
             nccl::UniqueId id = unique_id_of(unique_id);
             nccl::Options options =
                 options_of(blocking, cga_cluster_size, min_ctas, max_ctas, split_share);
             InterpreterRelease release;
             return Comm::init(std::move(library), id, size, rank, options);
           }),
           py::arg("library"), py::arg("unique_id").none(false), py::arg("size"), py::arg("rank"),
           py::arg("blocking") = py::none(), py::arg("cga_cluster_size") = py::none(),
           py::arg("min_ctas") = py::none(), py::arg("max_ctas") = py::none(),
           py::arg("split_share") = py::none())
      .def_property_readonly("alive", &Comm::alive, "False after destroy() or abort().")
      .def("size", &Comm::size, Released())
      .def("rank", &Comm::rank, Released())
      .def("device", &Comm::device, Released(), "Return the CUDA device.")
      .def("async_error", &Comm::async_error, Released(),
           "Return 0, IN_PROGRESS, or an error's code.")
      .def("finalize", &Comm::finalize, Released())
      .def("destroy", &Comm::destroy, Released())
      .def("abort", &Comm::abort, Released(), "Abort the communicator and its running calls.")
      .def(
          "split",
          [](Comm& self, int color, int key, std::optional<bool> blocking, Number min_ctas,
             Number max_ctas, std::optional<bool> split_share) {
            return self.split(color, key,
                              options_of(blocking, {}, min_ctas, max_ctas, split_share));
          },
          py::arg("color"), py::arg("key"), py::arg("blocking") = py::none(),
          py::arg("min_ctas") = py::none(), py::arg("max_ctas") = py::none(),
          py::arg("split_share") = py::none(), Released(),
          "Return a new communicator of the ranks with this color, None for color -1.")
      .def(
          "shrink",
          [](Comm& self, const std::vector<int>& excluded, bool abort,
             std::optional<bool> blocking) {
            return self.shrink(excluded, abort, options_of(blocking, {}, {}, {}, {}));
          },
          py::arg("excluded"), py::arg("abort") = false, py::arg("blocking") = py::none(),
          Released(), "Return a communicator without the excluded ranks. `abort`: after an error.")
      .def(
          "register",
          [](Comm& self, Address buffer, std::size_t size) {
            return reinterpret_cast<Address>(self.register_buffer(memory(buffer), size));
          },
          py::arg("buffer"), py::arg("size"), Released())
      .def(
          "deregister",
          [](Comm& self, Address registration) { self.deregister_buffer(memory(registration)); },
          py::arg("registration"), Released())
      .def(
          "make_pre_mul_sum",
          [](Comm& self, const std::string& factor, int type) {
            if (factor.size() > 8) throw std::invalid_argument("a factor has at most 8 bytes");
            char bytes[8] = {};  // NCCL reads the bytes that the type has
            std::memcpy(bytes, factor.data(), factor.size());
            return self.make_pre_mul_sum(bytes, type);
          },
          py::arg("factor"), py::arg("type"), Released(),
          "Create a reduction that multiplies by a factor, given as bytes, before it adds.")
      .def("destroy_op", &Comm::destroy_op, py::arg("op"), Released())
      .def(
          "all_reduce",
          [](Comm& self, Address send, Address recv, std::size_t count, int type, int op,
             Address s) {
            self.all_reduce(memory(send), memory(recv), count, type, op, stream(s));
          },
          py::arg("send"), py::arg("recv"), py::arg("count"), py::arg("type"), py::arg("op"),
          py::arg("stream"), Released())
      .def(
          "reduce",
          [](Comm& self, Address send, Address recv, std::size_t count, int type, int op, int root,
             Address s) {
            self.reduce(memory(send), memory(recv), count, type, op, root, stream(s));
          },
          py::arg("send"), py::arg("recv"), py::arg("count"), py::arg("type"), py::arg("op"),
          py::arg("root"), py::arg("stream"), Released())
      .def(
          "broadcast",
          [](Comm& self, Address send, Address recv, std::size_t count, int type, int root,
             Address s) {
            self.broadcast(memory(send), memory(recv), count, type, root, stream(s));
          },
          py::arg("send"), py::arg("recv"), py::arg("count"), py::arg("type"), py::arg("root"),
          py::arg("stream"), Released())
      .def(
          "all_gather",
          [](Comm& self, Address send, Address recv, std::size_t count, int type, Address s) {
            self.all_gather(memory(send), memory(recv), count, type, stream(s));
          },
          py::arg("send"), py::arg("recv"), py::arg("count"), py::arg("type"), py::arg("stream"),
          Released())
      .def(
          "reduce_scatter",
          [](Comm& self, Address send, Address recv, std::size_t count, int type, int op,
             Address s) {
            self.reduce_scatter(memory(send), memory(recv), count, type, op, stream(s));
          },
          py::arg("send"), py::arg("recv"), py::arg("count"), py::arg("type"), py::arg("op"),
          py::arg("stream"), Released())
      .def(
          "all_to_all",
          [](Comm& self, Address send, Address recv, std::size_t count, int type, Address s) {
            self.all_to_all(memory(send), memory(recv), count, type, stream(s));
          },
          py::arg("send"), py::arg("recv"), py::arg("count"), py::arg("type"), py::arg("stream"),
          Released())
      .def(
          "gather",
          [](Comm& self, Address send, Address recv, std::size_t count, int type, int root,
             Address s) { self.gather(memory(send), memory(recv), count, type, root, stream(s)); },
          py::arg("send"), py::arg("recv"), py::arg("count"), py::arg("type"), py::arg("root"),
          py::arg("stream"), Released())
      .def(
          "scatter",
          [](Comm& self, Address send, Address recv, std::size_t count, int type, int root,
             Address s) { self.scatter(memory(send), memory(recv), count, type, root, stream(s)); },
          py::arg("send"), py::arg("recv"), py::arg("count"), py::arg("type"), py::arg("root"),
          py::arg("stream"), Released())
      .def(
          "send",
          [](Comm& self, Address data, std::size_t count, int type, int peer, Address s) {
            self.send(memory(data), count, type, peer, stream(s));
          },
          py::arg("data"), py::arg("count"), py::arg("type"), py::arg("peer"), py::arg("stream"),
          Released())
      .def(
          "recv",
          [](Comm& self, Address data, std::size_t count, int type, int peer, Address s) {
            self.recv(memory(data), count, type, peer, stream(s));
          },
          py::arg("data"), py::arg("count"), py::arg("type"), py::arg("peer"), py::arg("stream"),
          Released());
}

}  // namespace pycollective
