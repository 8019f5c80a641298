// Records of kernel calls, which are replayed on other arrays without Python.
//
// While a record is active in a thread, each kernel call of the thread adds itself to the record.
// A record numbers the arrays as buffers. Each replay binds the buffers of inputs and outputs to
// arrays. All other buffers are internal, and share the memory that each replay gets. The record is
// refused if a kernel reads an array that is neither an input nor the result of a recorded kernel.
// A replay would not compute such an array again.
#pragma once

#include <pybind11/numpy.h>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/interpreter_release.h"

namespace pycollective {

// An array that a kernel reads or writes; null for an array that was left out.
template <typename T>
struct Operand {
  T* data = nullptr;
  int buffer = -1;
  std::ptrdiff_t offset = 0;  // in bytes, from the start of the buffer
};

// The places of the operands of a call: their own arrays, or the buffers of a replay.
class Places {
 public:
  explicit Places(char* const* buffers = nullptr) : buffers_(buffers) {}

  template <typename T>
  T* operator()(const Operand<T>& operand) const {
    if (!buffers_ || !operand.data) return operand.data;
    return reinterpret_cast<T*>(buffers_[operand.buffer] + operand.offset);
  }

 private:
  char* const* buffers_;
};

class Record {
 public:
  using Arrays = std::vector<pybind11::array>;
  using Call = std::function<void(const Places&)>;
  enum class Access { kRead, kWrite };

  Record() = default;
  ~Record() { stop(); }
  Record(const Record&) = delete;
  Record& operator=(const Record&) = delete;

  // The record that is active in this thread, or null.
  static Record*& active();

  // Begins a part, which reads these arrays and those of earlier parts. Returns false if a record
  // is active in this thread.
  bool begin(const Arrays& inputs);
  // Ends the part. Returns true if replays of the part give the same outputs.
  bool end(const Arrays& outputs);
  // Ends the part without a result.
  void stop();
  // Ends the record, and returns the bytes of memory that a replay needs.
  std::size_t plan();
  // Returns the reason why the record cannot be replayed, or "".
  const std::string& refusal() const { return refusal_; }

  // For kernels: returns the buffer of an array that the kernel reads or writes, and the offset of
  // the array in the buffer in bytes.
  std::pair<int, std::ptrdiff_t> buffer_of(const pybind11::array& array, Access access);
  void add(Call call, bool brief);
  void refuse(const std::string& reason);

 private:
  friend class Replay;

  struct Buffer {
    std::size_t bytes;
    bool internal;
    pybind11::dtype type;  // of an input or output
    // For an internal buffer: the first and last call that use it, and its place in the memory.
    std::size_t first, last, offset;
  };
  struct Part {
    std::vector<int> inputs, outputs;
    std::vector<Call> calls;
    bool brief = true;
  };

  int find(const char* first, std::size_t bytes) const;

  std::vector<Buffer> buffers_;
  std::vector<Part> parts_;
  std::size_t calls_ = 0;
  // The buffers whose arrays exist, by their first byte.
  std::map<const char*, int> live_;
  std::vector<pybind11::object> watched_;  // weak references to the arrays of internal buffers
  std::string refusal_;
};

// One run of a record, part by part.
class Replay {
 public:
  Replay(std::shared_ptr<const Record> record, const pybind11::array& memory);

  // Runs the next part. Returns false, without running a kernel, unless the arrays have the types
  // and sizes of the recorded ones.
  bool run(const std::vector<pybind11::object>& inputs,
           const std::vector<pybind11::object>& outputs);

 private:
  bool bind(int buffer, const pybind11::object& value, bool writeable);

  std::shared_ptr<const Record> record_;
  std::size_t next_ = 0;
  std::vector<char*> places_;
  std::vector<pybind11::object> kept_;
};

// Runs a kernel without the GIL, and adds it to the record of this thread. `body` must hold copies
// of all that it needs. A `brief` kernel keeps the GIL.
template <typename Body>
void launch(bool brief, const Body& body) {
  if (Record* record = Record::active()) record->add(body, brief);
  InterpreterRelease release(brief);
  body(Places());
}

}  // namespace pycollective
