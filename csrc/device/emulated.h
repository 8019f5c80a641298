// Emulated devices in host memory, for tests of the executor. Work on streams is stored and
// executed later, in any order that streams and events allow. Streams tend to run far ahead of or
// behind each other, so that a missing wait shows as a wrong result.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "device/runtime.h"

namespace pycollective::device {

class EmulatedRuntime final : public Runtime {
 public:
  // The number of calls of each kind.
  struct Counts {
    int allocations = 0, frees = 0, copies = 0, combinations = 0, packs = 0, records = 0, waits = 0;
  };

  // `cliques[d]` is the clique of device d. Devices of a clique reach each other's memory.
  EmulatedRuntime(std::vector<int> cliques, std::uint64_t seed);
  // Discards the remaining work.
  ~EmulatedRuntime() override;

  bool reaches(int device, int other) override;
  std::byte* allocate(int device, std::size_t bytes, Stream stream) override;
  void free(int device, std::byte* memory, Stream stream) noexcept override;
  std::unique_ptr<Event> event(int device, bool timed) override;
  void record(Event& event, int device, Stream stream) override;
  void wait(const Event& event, int device, Stream stream) override;
  // Also makes some progress, so that repeated polls end.
  bool over(const Event& event) override;
  double seconds_between(const Event& first, const Event& second) override;
  void copy(void* target, int target_device, const void* source, int source_device,
            std::size_t bytes, Stream stream) override;
  void combine(DType dtype, Op op, void* const* targets, int num_targets,
               const void* const* sources, int num_sources, std::size_t count, int size, int device,
               Stream stream) override;
  void pack(void* packed, DType packed_type, const std::vector<Piece>& pieces, DType piece_type,
            double scale, int device, Stream stream) override;
  void unpack(const void* packed, DType packed_type, const std::vector<Piece>& pieces,
              DType piece_type, double scale, int device, Stream stream) override;

  // Declares the device of memory that was not allocated here. Kernels of devices that do not reach
  // it are refused.
  void own(int device, const void* memory, std::size_t bytes);
  // Executes all work. Throws std::logic_error if streams wait for each other.
  void run();
  // While on, only run() executes work.
  void hold(bool on);
  // After `calls` more successful calls, the next one fails; after `waits` more waits, the next one
  // is ignored.
  void fail_after(int calls);
  void lose_wait_after(int waits);
  // From now on all calls for this device fail, over() included, as in CUDA after a failed kernel.
  // The device's pending work on arrays is not executed.
  void break_device(int device);
  Counts counts();

 private:
  struct Recorded;
  struct EmulatedEvent;
  struct Task {
    std::function<bool()> ready;  // empty: always ready
    std::function<void()> work;
    bool at_arrays = false;  // not executed by a broken device: the arrays may be freed
  };
  struct Lane {  // a stream
    std::deque<Task> tasks;
    std::uint64_t priority = 0;
  };

  void check(int device);
  void check_not_broken(int device) const;
  void check_reach(int device, const void* memory);
  void enqueue(int device, Stream stream, Task task);
  bool step();
  void run_some_tasks();
  void convert(const void* packed, DType packed_type, const std::vector<Piece>& pieces,
               DType piece_type, double scale, bool packs, int device, Stream stream);

  std::mutex mutex_;
  std::vector<int> cliques_;
  std::mt19937_64 random_;
  std::map<std::pair<int, Stream>, Lane> lanes_;
  std::map<const std::byte*, std::pair<std::size_t, int>> owners_;  // by address: bytes and device
  std::set<std::byte*> allocated_;
  std::set<int> broken_;
  bool held_ = false;
  int fail_after_ = -1, lose_wait_after_ = -1;
  Counts counts_;
};

}  // namespace pycollective::device
