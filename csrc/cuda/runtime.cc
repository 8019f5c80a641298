// The device::Runtime of CUDA devices.
#include "device/runtime.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/device.h"
#include "cuda/kernels.h"
#include "support/lasting.h"

namespace pycollective::cuda {
namespace {

using device::Event;
using device::Piece;
using device::Stream;

// Bytes of unused memory that a device's pool keeps for later allocations.
constexpr std::uint64_t kKeptBytes = std::uint64_t{256} << 20;

[[noreturn]] void fail(cudaError_t status, const std::string& what) {
  (void)cudaGetLastError();  // reported here: clear it for the next call
  throw std::runtime_error("CUDA, " + what + ": " + cudaGetErrorString(status) + " (" +
                           cudaGetErrorName(status) + ")");
}

cudaStream_t stream_of(Stream stream) {
  return reinterpret_cast<cudaStream_t>(stream);  // NOLINT: converted back from a number
}

// Sets this thread's current device until the destructor.
class Current {
 public:
  explicit Current(int device) {
    check(cudaGetDevice(&before_), "reading the current device");
    changed_ = before_ != device;
    if (!changed_) return;
    cudaError_t status = cudaSetDevice(device);
    if (status != cudaSuccess) fail(status, "using device " + std::to_string(device));
  }
  ~Current() {
    if (changed_) (void)cudaSetDevice(before_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

class CudaEvent : public Event {
 public:
  CudaEvent(int device, bool timed) {
    Current current(device);
    check(cudaEventCreateWithFlags(&event_, timed ? cudaEventDefault : cudaEventDisableTiming),
          "creating an event");
  }
  ~CudaEvent() override { (void)cudaEventDestroy(event_); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  static cudaEvent_t of(const Event& event) { return static_cast<const CudaEvent&>(event).event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

class CudaRuntime : public device::Runtime {
 public:
  bool reaches(int device, int other) override;

  std::byte* allocate(int device, std::size_t bytes, Stream stream) override;
  void free(int device, std::byte* memory, Stream stream) noexcept override;

  std::unique_ptr<Event> event(int device, bool timed) override {
    return std::make_unique<CudaEvent>(device, timed);
  }

  void record(Event& event, int device, Stream stream) override {
    Current current(device);
    check(cudaEventRecord(CudaEvent::of(event), stream_of(stream)), "recording an event");
  }

  void wait(const Event& event, int device, Stream stream) override {
    Current current(device);
    check(cudaStreamWaitEvent(stream_of(stream), CudaEvent::of(event), 0), "waiting for an event");
  }

  bool over(const Event& event) override {
    cudaError_t status = cudaEventQuery(CudaEvent::of(event));
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    check(status, "work before an event");
    return true;
  }

  double seconds_between(const Event& first, const Event& second) override {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, CudaEvent::of(first), CudaEvent::of(second)),
          "reading the time between events");
    return static_cast<double>(milliseconds) / 1e3;
  }

  void copy(void* target, int target_device, const void* source, int source_device,
            std::size_t bytes, Stream stream) override;

  void combine(DType dtype, Op op, void* const* targets, int num_targets,
               const void* const* sources, int num_sources, std::size_t count, int size, int device,
               Stream stream) override {
    const Known& known = about(device);
    Current current(device);
    start_combine(dtype, op, targets, num_targets, sources, num_sources, count, size,
                  known.multiprocessors, stream_of(stream));
  }

  void pack(void* packed, DType packed_type, const std::vector<Piece>& pieces, DType piece_type,
            double scale, int device, Stream stream) override {
    const Known& known = about(device);
    Current current(device);
    start_pack(packed, packed_type, pieces, piece_type, scale, false, known.multiprocessors,
               stream_of(stream));
  }

  void unpack(const void* packed, DType packed_type, const std::vector<Piece>& pieces,
              DType piece_type, double scale, int device, Stream stream) override {
    const Known& known = about(device);
    Current current(device);
    // unpack() only reads the packed array; packing and unpacking share a table.
    start_pack(const_cast<void*>(packed), packed_type, pieces, piece_type, scale, true,
               known.multiprocessors, stream_of(stream));
  }

 private:
  struct Known {
    int multiprocessors = 0;
    cudaMemPool_t pool = nullptr;  // nullptr if the device has no pools
  };

  // Returns the properties of a device. The first call for a device caches them and creates a
  // memory pool. A pool of this library's own keeps memory without changing the pools of other
  // libraries. The pool is never destroyed.
  const Known& about(int device);

  std::mutex mutex_;
  std::map<int, Known> devices_;
  std::map<std::pair<int, int>, bool> reaches_;
};

const CudaRuntime::Known& CudaRuntime::about(int device) {
  std::lock_guard lock(mutex_);
  if (auto found = devices_.find(device); found != devices_.end()) return found->second;
  Known known;
  int pools = 0;
  cudaError_t status =
      cudaDeviceGetAttribute(&known.multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess)
    fail(status, "reading the properties of device " + std::to_string(device));
  check(cudaDeviceGetAttribute(&pools, cudaDevAttrMemoryPoolsSupported, device),
        "reading the support for memory pools");
  if (pools) {
    Current current(device);
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = device;
    check(cudaMemPoolCreate(&known.pool, &properties), "creating a memory pool");
    std::uint64_t kept = kKeptBytes;
    check(cudaMemPoolSetAttribute(known.pool, cudaMemPoolAttrReleaseThreshold, &kept),
          "configuring a memory pool");
  }
  return devices_.emplace(device, known).first->second;
}

bool CudaRuntime::reaches(int device, int other) {
  if (device == other) return true;
  const Known& theirs = about(other);
  std::lock_guard lock(mutex_);
  if (auto found = reaches_.find({device, other}); found != reaches_.end()) return found->second;
  int can = 0;
  cudaError_t status = cudaDeviceCanAccessPeer(&can, device, other);
  const std::string between = std::to_string(device) + " and " + std::to_string(other);
  if (status != cudaSuccess) fail(status, "reading the access between devices " + between);
  if (can) {
    Current current(device);
    status = cudaDeviceEnablePeerAccess(other, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) {
      (void)cudaGetLastError();
    } else if (status != cudaSuccess) {
      fail(status, "enabling access between devices " + between);
    }
    if (theirs.pool) {
      // Only a pool's own device can access it by default. Open this library's pool, and the
      // default pool, where other libraries may allocate arrays.
      cudaMemAccessDesc access{};
      access.location.type = cudaMemLocationTypeDevice;
      access.location.id = device;
      access.flags = cudaMemAccessFlagsProtReadWrite;
      cudaMemPool_t shared = nullptr;
      check(cudaDeviceGetDefaultMemPool(&shared, other), "reading a peer's memory pool");
      for (cudaMemPool_t pool : {theirs.pool, shared}) {
        check(cudaMemPoolSetAccess(pool, &access, 1), "opening a memory pool to a peer");
      }
    }
  }
  return reaches_[{device, other}] = can != 0;
}

std::byte* CudaRuntime::allocate(int device, std::size_t bytes, Stream stream) {
  if (bytes == 0) return nullptr;
  const Known& known = about(device);
  Current current(device);
  void* memory = nullptr;
  cudaError_t status = known.pool
                           ? cudaMallocFromPoolAsync(&memory, bytes, known.pool, stream_of(stream))
                           : cudaMalloc(&memory, bytes);
  if (status != cudaSuccess) {
    fail(status,
         "allocating " + std::to_string(bytes) + " bytes on device " + std::to_string(device));
  }
  return static_cast<std::byte*>(memory);
}

void CudaRuntime::free(int device, std::byte* memory, Stream stream) noexcept {
  // Ignore errors: another call reports them.
  if (!memory) return;
  try {
    const Known& known = about(device);
    Current current(device);
    if (known.pool) {
      (void)cudaFreeAsync(memory, stream_of(stream));
    } else {
      (void)cudaStreamSynchronize(stream_of(stream));
      (void)cudaFree(memory);
    }
  } catch (const std::exception&) {
    return;
  }
}

void CudaRuntime::copy(void* target, int target_device, const void* source, int source_device,
                       std::size_t bytes, Stream stream) {
  if (bytes == 0) return;
  Current current(target_device);
  cudaError_t status =
      target_device == source_device
          ? cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToDevice, stream_of(stream))
          : cudaMemcpyPeerAsync(target, target_device, source, source_device, bytes,
                                stream_of(stream));
  if (status != cudaSuccess) {
    fail(status, "copying " + std::to_string(bytes) + " bytes from device " +
                     std::to_string(source_device) + " to " + std::to_string(target_device));
  }
}

}  // namespace

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) fail(status, what);
}

device::Runtime& runtime() { return lasting<CudaRuntime>(); }

}  // namespace pycollective::cuda
