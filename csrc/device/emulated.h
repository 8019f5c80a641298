// Devices in the host's memory, to test the executor with: what streams are given is kept, and done
// later, in any order that streams and events allow. One that is not waited for is likely to be far
// behind, or ahead, so that a missing wait shows as a wrong result.
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
  // What was asked of it so far.
  struct Counts {
    int allocations = 0, frees = 0, copies = 0, combinations = 0, packs = 0, records = 0, waits = 0;
  };

  // `cliques[d]`: devices of one number reach each other's memory.
  EmulatedRuntime(std::vector<int> cliques, std::uint64_t seed);
  // What is left is never done.
  ~EmulatedRuntime() override;

  bool reaches(int device, int other) override;
  std::byte* allocate(int device, std::size_t bytes, Stream stream) override;
  void free(int device, std::byte* memory, Stream stream) noexcept override;
  std::unique_ptr<Event> event(int device, bool timed) override;
  void record(Event& event, int device, Stream stream) override;
  void wait(const Event& event, int device, Stream stream) override;
  // Goes on a little as well, so that whoever asks again and again sees it happen.
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

  // Says on which device memory lies that was not allocated here: kernels of others are refused.
  void own(int device, const void* memory, std::size_t bytes);
  // Does all that there is to do. Throws std::logic_error where streams wait for each other.
  void run();
  // While it is held, only run() does anything.
  void hold(bool on);
  // From now on, the call after so many that succeed fails; and the wait after so many is lost.
  void fail_after(int calls);
  void lose_wait_after(int waits);
  // From now on everything on this device fails, over() too, as CUDA has it behind a kernel that
  // failed; and what it had still to do with arrays is left.
  void break_device(int device);
  Counts counts();

 private:
  struct Recorded;
  struct EmulatedEvent;
  struct Task {
    std::function<bool()> ready;  // empty: always
    std::function<void()> work;
    bool at_arrays = false;  // not done by a device that is broken: they may be gone
  };
  struct Lane {  // a stream
    std::deque<Task> tasks;
    std::uint64_t priority = 0;
  };

  void check(int device);
  void check_whole(int device) const;
  void check_reach(int device, const void* memory);
  void enqueue(int device, Stream stream, Task task);
  bool step();
  void go_on();
  void convert(const void* packed, DType packed_type, const std::vector<Piece>& pieces,
               DType piece_type, double scale, bool packs, int device, Stream stream);

  std::mutex mutex_;
  std::vector<int> cliques_;
  std::mt19937_64 random_;
  std::map<std::pair<int, Stream>, Lane> lanes_;
  std::map<const std::byte*, std::pair<std::size_t, int>> owners_;  // bytes and device
  std::set<std::byte*> allocated_;
  std::set<int> broken_;
  bool held_ = false;
  int fail_after_ = -1, lose_wait_after_ = -1;
  Counts counts_;
};

}  // namespace pycollective::device
