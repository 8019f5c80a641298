// The CUDA part, and its kernels alone for tests and benchmarks. combine() runs a kernel on
// unchecked addresses of GPU memory; combine_on_host() and pack_on_host() run the code on arrays of
// the host.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/dtypes.h"
#include "cuda/device.h"
#include "cuda/geometry.h"
#include "cuda/host_kernels.h"
#include "support/interpreter_release.h"

namespace py = pybind11;

namespace pycollective {
namespace {

using Address = std::uintptr_t;

std::vector<void*> pointers(const std::vector<Address>& addresses) {
  std::vector<void*> found;
  for (Address address : addresses) found.push_back(reinterpret_cast<void*>(address));
  return found;
}

void combine(const std::string& op, const py::dtype& dtype, const std::vector<Address>& targets,
             const std::vector<Address>& sources, std::size_t count, int size, int device,
             device::Stream stream) {
  auto [type, operation] = reduction_of(dtype, op);
  std::vector<void*> to = pointers(targets), from = pointers(sources);
  InterpreterRelease release;
  cuda::runtime().combine(type, operation, to.data(), static_cast<int>(to.size()), from.data(),
                          static_cast<int>(from.size()), count, size, device, stream);
}

void check_contiguous(const py::array& array) {
  if (!(array.flags() & py::array::c_style)) {
    throw std::invalid_argument("arrays must be C-contiguous");
  }
}

void check_multiprocessors(int multiprocessors) {
  if (multiprocessors < 1) throw std::invalid_argument("multiprocessors must be at least 1");
}

void combine_on_host(const std::string& op, const std::vector<py::array>& sources,
                     std::vector<py::array> outputs, int size, int multiprocessors) {
  if (sources.empty() || outputs.empty())
    throw std::invalid_argument("there must be at least one source and one output");
  check_multiprocessors(multiprocessors);
  auto [dtype, operation] = reduction_of(sources[0].dtype(), op);
  auto check = [&](const py::array& array) {
    check_contiguous(array);
    if (array.size() != sources[0].size() || !array.dtype().equal(sources[0].dtype())) {
      throw std::invalid_argument("all arrays must have the same size and dtype");
    }
  };
  std::vector<const void*> from;
  std::vector<void*> to;
  for (const py::array& source : sources) {
    check(source);
    from.push_back(source.data());
  }
  for (py::array& output : outputs) {
    check(output);
    to.push_back(output.mutable_data());
  }
  auto count = static_cast<std::size_t>(sources[0].size());
  InterpreterRelease release;
  cuda::combine_on_host(dtype, operation, to.data(), static_cast<int>(to.size()), from.data(),
                        static_cast<int>(from.size()), count, size, multiprocessors);
}

void pack_on_host(py::array packed, std::vector<py::array> pieces,
                  const std::vector<std::size_t>& offsets, double scale, bool unpacks,
                  int multiprocessors) {
  check_multiprocessors(multiprocessors);
  check_contiguous(packed);
  if (pieces.empty() || pieces.size() != offsets.size()) {
    throw std::invalid_argument("there must be at least one piece, and an offset for each piece");
  }
  std::vector<device::Piece> all;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    check_contiguous(pieces[i]);
    auto count = static_cast<std::size_t>(pieces[i].size());
    auto size = static_cast<std::size_t>(packed.size());
    if (offsets[i] > size || count > size - offsets[i] ||
        !pieces[i].dtype().equal(pieces[0].dtype())) {
      throw std::invalid_argument(
          "all pieces must have the same dtype and lie within the packed array");
    }
    all.push_back({unpacks ? pieces[i].mutable_data() : const_cast<void*>(pieces[i].data()), count,
                   offsets[i]});
  }
  DType packed_as = packable(packed.dtype()), pieces_as = packable(pieces[0].dtype());
  void* memory = unpacks ? const_cast<void*>(packed.data()) : packed.mutable_data();
  InterpreterRelease release;
  cuda::pack_on_host(memory, packed_as, all, pieces_as, scale, unpacks, multiprocessors);
}

// Returns head, vectors, tiles, aligned (of Cut) and the number of blocks.
std::tuple<std::size_t, std::size_t, std::size_t, bool, unsigned> cut(
    const std::vector<Address>& arrays, std::size_t count, std::size_t item,
    std::size_t tile_vectors, int multiprocessors) {
  if (arrays.empty() || arrays.size() > device::kMaxArrays) {
    throw std::invalid_argument("one launch combines 1 to 16 arrays");
  }
  cuda::Combination c{};
  for (Address address : arrays) {
    c.sources[c.num_sources++] = reinterpret_cast<const void*>(address);
  }
  c.targets[c.num_targets++] = reinterpret_cast<void*>(arrays[0]);
  c.count = count;
  c.cut = cuda::cut(c, item, tile_vectors, multiprocessors);
  return {c.cut.head, c.cut.vectors, c.cut.tiles, c.cut.aligned,
          cuda::blocks_of(c, item, tile_vectors, multiprocessors)};
}

}  // namespace

void bind_cuda(py::module_& m) {
  m.def("built", &cuda::built, "Return True if this build has the CUDA part.");
  m.def("runtime_version", &cuda::runtime_version,
        "Return the CUDA runtime version of the build (e.g. 13000), 0 without CUDA.");
  m.def(
      "device_count",
      [] {
        std::string why;
        int count;
        {
          InterpreterRelease release;
          count = cuda::device_count(&why);
        }
        return std::make_pair(count, py::str(why));
      },
      "Return the number of CUDA devices and, if it is 0, the reason.");
  m.def("combine", &combine, py::arg("op"), py::arg("dtype"), py::arg("targets"),
        py::arg("sources"), py::arg("count"), py::arg("size") = 0, py::arg("device") = 0,
        py::arg("stream") = 0,
        "Combine arrays on a GPU, given by their addresses, like reduce_arrays.");
  m.def("combine_on_host", &combine_on_host, py::arg("op"), py::arg("sources"), py::arg("outputs"),
        py::arg("size") = 0, py::arg("multiprocessors") = 1,
        "Run the kernel's code on arrays of the host, one thread after the other.");
  m.def("pack_on_host", &pack_on_host, py::arg("packed"), py::arg("pieces"), py::arg("offsets"),
        py::arg("scale") = 1.0, py::arg("unpacks") = false, py::arg("multiprocessors") = 1,
        "Run the kernel's code on arrays of the host, one thread after the other.");
  m.def("cut", &cut, py::arg("arrays"), py::arg("count"), py::arg("item"), py::arg("tile_vectors"),
        py::arg("multiprocessors"),
        "Return how the work on arrays at these addresses is divided: (leading single items, "
        "vectors, tiles, True if single items are aligned, blocks).");
}

}  // namespace pycollective
