// Records of kernel calls, and their replay.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>

#include "nn/bindings/arguments.h"
#include "nn/bindings/bindings.h"
#include "nn/bindings/record.h"

namespace pycollective {
namespace {

namespace py = pybind11;
using namespace pybind11::literals;

constexpr std::size_t kAlignment = 64;
// Up to this many short kernels run with the GIL: reacquiring it could take longer than they do.
constexpr std::size_t kFewCalls = 4;

const char* first_byte(const Array& a) { return static_cast<const char*>(a.data()); }

std::size_t bytes_of(const Array& a) { return static_cast<std::size_t>(a.nbytes()); }

bool is_plain(const Array& a) {
  constexpr int kPlain = int{py::array::c_style} | int{py::detail::npy_api::NPY_ARRAY_ALIGNED_};
  return (a.flags() & kPlain) == kPlain;
}

bool same_type(const py::dtype& a, const py::dtype& b) {
  return a.is(b) || py::detail::npy_api::get().PyArray_EquivTypes_(a.ptr(), b.ptr());
}

// Returns the array that has the memory of a view.
Array owner_of(Array array) {
  while (py::isinstance<py::array>(array.base())) {
    array = py::reinterpret_borrow<py::array>(array.base());
  }
  return array;
}

}  // namespace

Record*& Record::active() {
  thread_local Record* record = nullptr;
  return record;
}

void Record::refuse(const std::string& reason) {
  if (refusal_.empty()) refusal_ = reason;
}

// Returns the number of the buffer that has these bytes, or -1.
int Record::find(const char* first, std::size_t bytes) const {
  auto after = live_.upper_bound(first);
  if (after == live_.begin()) return -1;
  const auto& [start, number] = *--after;
  const bool inside = first + bytes <= start + buffers_[static_cast<std::size_t>(number)].bytes;
  return inside ? number : -1;
}

bool Record::begin(const Arrays& inputs) {
  if (active()) return false;
  parts_.emplace_back();
  for (const Array& array : inputs) {
    if (array.size() == 0 || !is_plain(array)) refuse("an input is empty, or not in C order");
    if (find(first_byte(array), 1) >= 0) refuse("two inputs share memory");
    const int number = static_cast<int>(buffers_.size());
    buffers_.push_back({bytes_of(array), false, array.dtype(), 0, 0, 0});
    live_[first_byte(array)] = number;
    parts_.back().inputs.push_back(number);
  }
  active() = this;
  return true;
}

std::pair<int, std::ptrdiff_t> Record::buffer_of(const Array& array, Access access) {
  const char* first = first_byte(array);
  int number = find(first, bytes_of(array));
  if (number < 0) {
    if (access == Access::kRead) {
      refuse("a kernel reads an array that no recorded kernel wrote");
      return {-1, 0};
    }
    const Array owner = owner_of(array);
    const char* start = first_byte(owner);
    if (!is_plain(owner) || first < start || first + bytes_of(array) > start + bytes_of(owner)) {
      refuse("a kernel writes to a part of an array that is not in C order");
      return {-1, 0};
    }
    number = static_cast<int>(buffers_.size());
    buffers_.push_back({bytes_of(owner), true, owner.dtype(), calls_, calls_, 0});
    live_[start] = number;
    // Another array may have the memory later.
    watched_.push_back(
        py::weakref(owner, py::cpp_function([this, start](py::handle) { live_.erase(start); })));
  }
  Buffer& buffer = buffers_[static_cast<std::size_t>(number)];
  if (access == Access::kWrite && !buffer.internal) refuse("a kernel writes to an input");
  buffer.last = calls_;
  return {number, first - std::prev(live_.upper_bound(first))->first};
}

void Record::add(Call call, bool brief) {
  Part& part = parts_.back();
  part.calls.push_back(std::move(call));
  part.brief = part.brief && brief && part.calls.size() <= kFewCalls;
  ++calls_;
}

bool Record::end(const Arrays& outputs) {
  stop();
  for (const Array& array : outputs) {
    const int number = array.size() == 0 ? -1 : find(first_byte(array), bytes_of(array));
    const auto index = static_cast<std::size_t>(number);
    if (number < 0 || !buffers_[index].internal || buffers_[index].bytes != bytes_of(array) ||
        !is_plain(array)) {
      refuse("an output is not the whole result of a recorded kernel");
      return false;
    }
    buffers_[index].internal = false;
    buffers_[index].type = array.dtype();
    parts_.back().outputs.push_back(number);
  }
  return refusal_.empty();
}

void Record::stop() {
  if (active() == this) active() = nullptr;
}

std::size_t Record::plan() {
  live_.clear();
  watched_.clear();
  std::vector<Buffer*> waiting, placed;
  for (Buffer& buffer : buffers_) {
    if (buffer.internal) waiting.push_back(&buffer);
  }
  std::stable_sort(waiting.begin(), waiting.end(),
                   [](const Buffer* a, const Buffer* b) { return a->bytes > b->bytes; });
  std::size_t total = 0;
  for (Buffer* buffer : waiting) {
    // Moves the buffer up until it overlaps no buffer that is in use at the same time.
    for (bool moved = true; std::exchange(moved, false);) {
      for (const Buffer* other : placed) {
        const bool together = buffer->first <= other->last && other->first <= buffer->last;
        const bool meet = buffer->offset < other->offset + other->bytes &&
                          other->offset < buffer->offset + buffer->bytes;
        if (!together || !meet) continue;
        buffer->offset = (other->offset + other->bytes + kAlignment - 1) / kAlignment * kAlignment;
        moved = true;
      }
    }
    placed.push_back(buffer);
    total = std::max(total, buffer->offset + buffer->bytes);
  }
  return total;
}

Replay::Replay(std::shared_ptr<const Record> record, const Array& memory)
    : record_(std::move(record)), places_(record_->buffers_.size()) {
  std::size_t needed = 0;
  char* start = static_cast<char*>(const_cast<void*>(memory.data()));
  for (std::size_t k = 0; k < places_.size(); ++k) {
    const Record::Buffer& buffer = record_->buffers_[k];
    if (!buffer.internal) continue;
    places_[k] = start + buffer.offset;
    needed = std::max(needed, buffer.offset + buffer.bytes);
  }
  if (!record_->refusal_.empty()) throw py::value_error("no replay: " + record_->refusal_);
  if (bytes_of(memory) < needed || !is_plain(memory) || !memory.writeable()) {
    throw py::value_error("the memory must have " + std::to_string(needed) + " bytes");
  }
  kept_.push_back(memory);
}

bool Replay::bind(int number, const py::object& value, bool writeable) {
  const Record::Buffer& buffer = record_->buffers_[static_cast<std::size_t>(number)];
  if (!py::isinstance<py::array>(value)) return false;
  const auto array = py::reinterpret_borrow<py::array>(value);
  if (!same_type(array.dtype(), buffer.type) || bytes_of(array) != buffer.bytes ||
      !is_plain(array) || (writeable && !array.writeable())) {
    return false;
  }
  places_[static_cast<std::size_t>(number)] = const_cast<char*>(first_byte(array));
  kept_.push_back(array);
  return true;
}

bool Replay::run(const std::vector<py::object>& inputs, const std::vector<py::object>& outputs) {
  if (next_ >= record_->parts_.size()) throw py::value_error("the replay is at its end");
  const Record::Part& part = record_->parts_[next_];
  if (inputs.size() != part.inputs.size() || outputs.size() != part.outputs.size()) return false;
  for (std::size_t k = 0; k < inputs.size(); ++k) {
    if (!bind(part.inputs[k], inputs[k], false)) return false;
  }
  for (std::size_t k = 0; k < outputs.size(); ++k) {
    if (!bind(part.outputs[k], outputs[k], true)) return false;
  }
  ++next_;
  InterpreterRelease release(part.brief);
  const Places at(places_.data());
  for (const Record::Call& call : part.calls) call(at);
  return true;
}

void bind_record(py::module_& m) {
  py::class_<Record, std::shared_ptr<Record>>(
      m, "Record", "The kernel calls of a thread, for replays on other arrays.")
      .def(py::init<>())
      .def("begin", &Record::begin, "inputs"_a,
           "Begin a part that reads these arrays; return False if a record is active already.")
      .def("end", &Record::end, "outputs"_a,
           "End the part; return True if replays give the same outputs.")
      .def("stop", &Record::stop, "End the part without a result.")
      .def("plan", &Record::plan, "End the record; return the bytes of memory that a replay needs.")
      .def_property_readonly("refusal", &Record::refusal,
                             "The reason why the record cannot be replayed, or an empty string.");
  py::class_<Replay>(m, "Replay", "One run of a record, part by part.")
      .def(py::init([](const std::shared_ptr<Record>& record, const Array& memory) {
             return Replay(record, memory);
           }),
           "record"_a, "memory"_a)
      .def("run", &Replay::run, "inputs"_a, "outputs"_a,
           "Run the next part; return False if the arrays differ in type or size from the recorded "
           "ones.");
}

}  // namespace pycollective
