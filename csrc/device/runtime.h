// What the executor for device arrays asks of the devices. cuda/runtime.cc answers on GPUs;
// emulated.cc does in the host's memory, in any order that streams and events allow, so that the
// executor is tested without a GPU.
//
// A stream does what it is given in order, and nothing here waits for it. Numbers of devices are
// CUDA's. Everything throws std::runtime_error with the runtime's words when it fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "reduce/reduce.h"

namespace pycollective::device {

// cudaStream_t, as CuPy and DLPack hand it out: 0 is the device's default stream.
using Stream = std::uintptr_t;

// A point in a stream, which happens when all before it is done.
class Event {
 public:
  virtual ~Event() = default;
};

// An array among others that lie together: `bytes` at `place`, and from `offset` on in what they
// are packed into.
struct Piece {
  void* place = nullptr;
  std::size_t count = 0;   // items
  std::size_t offset = 0;  // items
};

// The most sources, and targets, that one launch of combine() takes.
inline constexpr int kMaxArrays = 16;

class Runtime {
 public:
  virtual ~Runtime() = default;

  // Whether kernels on one device reach the other's memory; asked for once, it is enabled. True for
  // a device and itself.
  virtual bool reaches(int device, int other) = 0;

  // Memory that belongs to a stream's work: freed behind what the stream was given until then.
  virtual std::byte* allocate(int device, std::size_t bytes, Stream stream) = 0;
  virtual void free(int device, std::byte* memory, Stream stream) noexcept = 0;

  // One that is `timed` notes when it happens.
  virtual std::unique_ptr<Event> event(int device, bool timed) = 0;
  virtual void record(Event& event, int device, Stream stream) = 0;
  // What the stream is given from now on waits for the last record of the event.
  virtual void wait(const Event& event, int device, Stream stream) = 0;
  // Whether the last record of the event is over.
  virtual bool over(const Event& event) = 0;
  // Between two of one device that are timed and over.
  virtual double seconds_between(const Event& first, const Event& second) = 0;

  // Between any devices, by way of the host where they do not reach each other.
  virtual void copy(void* target, int target_device, const void* source, int source_device,
                    std::size_t bytes, Stream stream) = 0;

  // As combine_many() of reduce/reduce.h: reads each source once, in order, accumulates halves in
  // float32, writes to every target; a target may be one of the sources. One launch.
  virtual void combine(DType dtype, Op op, void* const* targets, int num_targets,
                       const void* const* sources, int num_sources, std::size_t count, int size,
                       int device, Stream stream) = 0;

  // Many small arrays into one, or back: items are converted from one type to another, and
  // multiplied by `scale` on the way. Few launches, whatever their number.
  virtual void pack(void* packed, DType packed_type, const std::vector<Piece>& pieces,
                    DType piece_type, double scale, int device, Stream stream) = 0;
  virtual void unpack(const void* packed, DType packed_type, const std::vector<Piece>& pieces,
                      DType piece_type, double scale, int device, Stream stream) = 0;
};

}  // namespace pycollective::device
