// NumPy arrays in the arena (transport/arena.h), through NumPy's data memory handlers (NEP 49).
#include <pybind11/numpy.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "support/lasting.h"
#include "support/tuning.h"
#include "transport/arena.h"
#include "transport/group.h"

namespace py = pybind11;

namespace pycollective {
namespace {

// The arena for NumPy's arrays: the arena of the group that was joined last.
struct Current {
  std::mutex mutex;
  std::weak_ptr<Arena> arena;

  std::shared_ptr<Arena> get() {
    std::lock_guard lock(mutex);
    return arena.lock();
  }
};

// The arena for the array that new_array() is creating.
thread_local const std::shared_ptr<Arena>* chosen = nullptr;

std::byte* allocate(std::size_t bytes, bool* is_zero) noexcept {
  if (!chosen && bytes < kSharedFrom) return nullptr;
  const std::shared_ptr<Arena> arena = chosen ? *chosen : lasting<Current>().get();
  return arena ? arena->allocate(bytes, is_zero) : nullptr;
}

void* handle_malloc(void*, std::size_t bytes) {
  std::byte* data = allocate(bytes, nullptr);
  return data ? data : std::malloc(bytes ? bytes : 1);
}

void* handle_calloc(void*, std::size_t count, std::size_t item) {
  std::size_t bytes = 0;
  if (__builtin_mul_overflow(count, item, &bytes)) return nullptr;
  bool is_zero = false;
  std::byte* data = allocate(bytes, &is_zero);
  if (!data) return std::calloc(count ? count : 1, item ? item : 1);
  if (!is_zero) std::memset(data, 0, bytes);
  return data;
}

void handle_free(void*, void* data, std::size_t) {
  Arena* arena = data ? Arena::of(data) : nullptr;
  if (arena) {
    arena->free(static_cast<std::byte*>(data));
  } else {
    std::free(data);
  }
}

void* handle_realloc(void* context, void* data, std::size_t bytes) {
  Arena* arena = data ? Arena::of(data) : nullptr;
  if (!arena) return std::realloc(data, bytes ? bytes : 1);
  const std::size_t room = arena->capacity(static_cast<std::byte*>(data));
  if (bytes <= room) return data;
  void* larger = handle_malloc(context, bytes);
  if (!larger) return nullptr;
  std::memcpy(larger, data, room);
  arena->free(static_cast<std::byte*>(data));
  return larger;
}

// NumPy's PyDataMem_Handler.
struct Handler {
  char name[127];
  std::uint8_t version;
  struct {
    void* context;
    void* (*malloc)(void*, std::size_t);
    void* (*calloc)(void*, std::size_t, std::size_t);
    void* (*realloc)(void*, void*, std::size_t);
    void (*free)(void*, void*, std::size_t);
  } allocator;
};

Handler handler = {
    "pycollective.shared_arrays",
    1,
    {nullptr, handle_malloc, handle_calloc, handle_realloc, handle_free},
};

// NumPy's PyDataMem_SetHandler: its index in the table of the C API. pybind11 has no name for it.
using SetHandler = PyObject* (*)(PyObject*);
constexpr std::size_t kSetHandler = 304;

SetHandler find_set_handler() {
  py::module_ umath;
  try {
    umath = py::module_::import("numpy._core._multiarray_umath");
  } catch (py::error_already_set&) {  // NumPy 1
    umath = py::module_::import("numpy.core._multiarray_umath");
  }
  py::object table = umath.attr("_ARRAY_API");
  auto** functions = static_cast<void**>(PyCapsule_GetPointer(table.ptr(), nullptr));
  if (!functions) throw py::error_already_set();
  return reinterpret_cast<SetHandler>(functions[kSetHandler]);
}

// Returns the previous handler. nullptr sets NumPy's own handler.
py::object set_handler(PyObject* capsule) {
  static const SetHandler set = find_set_handler();
  PyObject* before = set(capsule);
  if (!before) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(before);
}

// Returns the capsule of this module's handler. It is never freed.
PyObject* arena_handler() {
  static PyObject* const capsule = py::capsule(&handler, "mem_handler").release().ptr();
  return capsule;
}

}  // namespace

py::object new_array(const std::shared_ptr<Arena>& arena, PyObject* descr, int dims,
                     const Py_intptr_t* shape, std::size_t from) {
  auto make = [&] {
    auto& api = py::detail::npy_api::get();
    Py_INCREF(descr);
    return py::reinterpret_steal<py::object>(api.PyArray_NewFromDescr_(
        api.PyArray_Type_, descr, dims, shape, nullptr, nullptr, 0, nullptr));
  };
  py::object array;
  auto bytes = static_cast<std::size_t>(py::reinterpret_borrow<py::dtype>(descr).itemsize());
  for (int i = 0; i < dims; ++i) bytes *= static_cast<std::size_t>(shape[i]);
  if (!arena || bytes < from) {
    array = make();
  } else {
    const py::object before = set_handler(arena_handler());
    chosen = &arena;
    array = make();
    chosen = nullptr;
    const py::error_scope kept;  // keeps NumPy's MemoryError
    set_handler(before.ptr());
  }
  if (!array) throw py::error_already_set();
  return array;
}

void bind_arena(py::module_& m) {
  m.attr("ARENA_BYTES") = kArenaBytes;
  m.def(
      "share_arrays", [] { return set_handler(arena_handler()); },
      "Make NumPy allocate this thread's arrays in the arena. Return the previous handler, for "
      "set_handler().");
  m.def(
      "set_handler",
      [](const py::object& handler) {
        return set_handler(handler.is_none() ? nullptr : handler.ptr());
      },
      py::arg("handler"),
      "Set the handler that allocates NumPy's arrays of this thread; return the previous one.");
  m.def(
      "use_arena",
      [](Group& group) {
        auto& current = lasting<Current>();
        std::shared_ptr<Arena> arena = group.arena();
        if (!arena) return false;
        std::lock_guard lock(current.mutex);
        current.arena = arena;
        return true;
      },
      py::arg("group"),
      "Use this group's arena for shared arrays. Return False if the group has none.");
  m.def(
      "is_shared",
      [](const py::array& array) {
        Arena* arena = Arena::of(array.data());
        return arena &&
               arena->handle_of(array.data(), static_cast<std::size_t>(array.nbytes())) != 0;
      },
      py::arg("array"), "Return True if an array lies in an arena, which other ranks can map.");
}

}  // namespace pycollective
