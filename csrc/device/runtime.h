// The operations of devices that the executor needs. cuda/runtime.cc implements them for GPUs;
// emulated.cc implements them in host memory for tests without a GPU.
//
// A stream executes its work in order, and no function waits for a stream. Devices have CUDA's
// numbers. All functions throw std::runtime_error with the runtime's message on failure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "reduce/reduce.h"

namespace pycollective::device {

// A cudaStream_t, as CuPy and DLPack pass it; 0 is the device's default stream.
using Stream = std::uintptr_t;

// A point in a stream. It occurs when all earlier work is done.
class Event {
 public:
  virtual ~Event() = default;
};

// One of several small arrays that are packed together: its address, and its offset in the packed
// array.
struct Piece {
  void* address = nullptr;
  std::size_t count = 0;   // items
  std::size_t offset = 0;  // items
};

// The maximum of sources, and of targets, of one combine().
inline constexpr int kMaxArrays = 16;

class Runtime {
 public:
  virtual ~Runtime() = default;

  // Returns true if kernels on one device can access the other's memory, and enables the access.
  // True for a device and itself.
  virtual bool reaches(int device, int other) = 0;

  // Memory that is allocated and freed in stream order.
  virtual std::byte* allocate(int device, std::size_t bytes, Stream stream) = 0;
  virtual void free(int device, std::byte* memory, Stream stream) noexcept = 0;

  // A `timed` event records the time of its occurrence.
  virtual std::unique_ptr<Event> event(int device, bool timed) = 0;
  virtual void record(Event& event, int device, Stream stream) = 0;
  // Makes the stream's later work wait for the event's last record.
  virtual void wait(const Event& event, int device, Stream stream) = 0;
  // Returns true if the event's last record has occurred.
  virtual bool over(const Event& event) = 0;
  // Both events must be timed, of one device, and over.
  virtual double seconds_between(const Event& first, const Event& second) = 0;

  // Copies between any two devices, through the host if they do not reach each other.
  virtual void copy(void* target, int target_device, const void* source, int source_device,
                    std::size_t bytes, Stream stream) = 0;

  // Like combine_many() in reduce/reduce.h, in one kernel: reads each source once, in order,
  // accumulates halves in float32, writes every target. A target may be one of the sources.
  virtual void combine(DType dtype, Op op, void* const* targets, int num_targets,
                       const void* const* sources, int num_sources, std::size_t count, int size,
                       int device, Stream stream) = 0;

  // Packs many small arrays into one, or unpacks them: converts the items' type and multiplies by
  // `scale`. Runs few kernels for any number of arrays.
  virtual void pack(void* packed, DType packed_type, const std::vector<Piece>& pieces,
                    DType piece_type, double scale, int device, Stream stream) = 0;
  virtual void unpack(const void* packed, DType packed_type, const std::vector<Piece>& pieces,
                      DType piece_type, double scale, int device, Stream stream) = 0;
};

}  // namespace pycollective::device
