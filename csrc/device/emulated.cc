#include "device/emulated.h"

#include <algorithm>
#include <chrono>
#include <complex>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "reduce/half.h"

namespace pycollective::device {
namespace {

// The content of new memory: NaNs, and numbers that no test uses.
constexpr int kPoison = 0xff;

template <class T>
std::complex<double> load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return static_cast<std::complex<double>>(value);
}

template <class T>
void store(std::byte* at, std::complex<double> value) {
  auto stored = static_cast<T>(value.real());
  std::memcpy(at, &stored, sizeof stored);
}

template <class T>
void store_complex(std::byte* at, std::complex<double> value) {
  auto stored = static_cast<std::complex<T>>(value);
  std::memcpy(at, &stored, sizeof stored);
}

template <const HalfType& (*kType)()>
std::complex<double> load_half(const std::byte* at) {
  std::uint16_t bits;
  float value;
  std::memcpy(&bits, at, sizeof bits);
  kType().widen(&value, &bits, 1);
  return static_cast<double>(value);
}

template <const HalfType& (*kType)()>
void store_half(std::byte* at, std::complex<double> value) {
  auto number = static_cast<float>(value.real());
  std::uint16_t bits;
  kType().narrow(&bits, &number, 1);
  std::memcpy(at, &bits, sizeof bits);
}

struct Access {
  std::complex<double> (*load)(const std::byte*);
  void (*store)(std::byte*, std::complex<double>);
};

template <class T>
constexpr Access of() {
  return {load<T>, store<T>};
}

constexpr Access kAccess[kDTypes] = {
    // in the order of DType
    of<bool>(),
    of<std::int8_t>(),
    of<std::int16_t>(),
    of<std::int32_t>(),
    of<std::int64_t>(),
    of<std::uint8_t>(),
    of<std::uint16_t>(),
    of<std::uint32_t>(),
    of<std::uint64_t>(),
    {load_half<float16>, store_half<float16>},
    {load_half<bfloat16>, store_half<bfloat16>},
    of<float>(),
    of<double>(),
    {load<std::complex<float>>, store_complex<float>},
    {load<std::complex<double>>, store_complex<double>},
};

}  // namespace

struct EmulatedRuntime::Recorded {
  std::uint64_t asked = 0, happened = 0;  // numbers of records
  std::chrono::steady_clock::time_point time;
};

struct EmulatedRuntime::EmulatedEvent final : Event {
  EmulatedEvent(int of, bool is_timed) : device(of), timed(is_timed) {}
  const int device;
  const bool timed;
  std::shared_ptr<Recorded> recorded = std::make_shared<Recorded>();
};

EmulatedRuntime::EmulatedRuntime(std::vector<int> cliques, std::uint64_t seed)
    : cliques_(std::move(cliques)), random_(seed) {}

EmulatedRuntime::~EmulatedRuntime() {
  for (std::byte* memory : allocated_) delete[] memory;
}

void EmulatedRuntime::check(int device) {
  if (device < 0 || device >= static_cast<int>(cliques_.size())) {
    throw std::runtime_error("there is no device " + std::to_string(device));
  }
  check_not_broken(device);
  if (fail_after_ >= 0 && fail_after_-- == 0) throw std::runtime_error("the device has failed");
}

void EmulatedRuntime::check_not_broken(int device) const {
  if (broken_.contains(device)) {
    throw std::runtime_error("device " + std::to_string(device) + " is broken");
  }
}

void EmulatedRuntime::check_reach(int device, const void* memory) {
  const auto* at = static_cast<const std::byte*>(memory);
  auto place = owners_.upper_bound(at);
  if (place == owners_.begin()) return;
  --place;
  auto [bytes, owner] = place->second;
  if (at >= place->first + bytes || reaches(device, owner)) return;
  throw std::runtime_error("a kernel on device " + std::to_string(device) +
                           " does not reach the memory of device " + std::to_string(owner));
}

bool EmulatedRuntime::reaches(int device, int other) {
  return cliques_.at(static_cast<std::size_t>(device)) ==
         cliques_.at(static_cast<std::size_t>(other));
}

void EmulatedRuntime::enqueue(int device, Stream stream, Task task) {
  auto [place, added] = lanes_.try_emplace({device, stream});
  if (added) place->second.priority = random_();
  place->second.tasks.push_back(std::move(task));
  if (!held_) run_some_tasks();
}

// Usually does nothing, so that many tasks are available to choose from; sometimes runs a few
// tasks.
void EmulatedRuntime::run_some_tasks() {
  if (random_() % 32 != 0) return;
  for (auto left = random_() % 8; left > 0 && step(); --left) {
  }
}

bool EmulatedRuntime::step() {
  Lane* next = nullptr;
  bool breaks = false;
  for (auto& [name, lane] : lanes_) {
    if (lane.tasks.empty() || (lane.tasks.front().ready && !lane.tasks.front().ready())) continue;
    if (next && lane.priority <= next->priority) continue;
    next = &lane;
    breaks = broken_.contains(name.first);
  }
  if (!next) return false;
  // A stream gets as far ahead as possible until another one gets a higher priority.
  if (random_() % 16 == 0) next->priority = random_();
  Task task = std::move(next->tasks.front());
  next->tasks.pop_front();
  if (task.work && !(breaks && task.at_arrays)) task.work();
  return true;
}

std::byte* EmulatedRuntime::allocate(int device, std::size_t bytes, Stream stream) {
  std::lock_guard lock(mutex_);
  check(device);
  ++counts_.allocations;
  auto* memory = new std::byte[std::max<std::size_t>(bytes, 1)];
  owners_[memory] = {bytes, device};
  allocated_.insert(memory);
  // Work that uses the memory before the stream reaches the allocation loses its data.
  enqueue(device, stream, {{}, [=] { std::memset(memory, kPoison, bytes); }});
  return memory;
}

void EmulatedRuntime::free(int device, std::byte* memory, Stream stream) noexcept {
  std::lock_guard lock(mutex_);
  ++counts_.frees;
  enqueue(device, stream, {{}, [this, memory] {
                             std::memset(memory, kPoison, owners_[memory].first);
                             owners_.erase(memory);
                             allocated_.erase(memory);
                             delete[] memory;
                           }});
}

std::unique_ptr<Event> EmulatedRuntime::event(int device, bool timed) {
  std::lock_guard lock(mutex_);
  check(device);
  return std::make_unique<EmulatedEvent>(device, timed);
}

void EmulatedRuntime::record(Event& event, int device, Stream stream) {
  std::lock_guard lock(mutex_);
  check(device);
  ++counts_.records;
  auto recorded = static_cast<EmulatedEvent&>(event).recorded;
  std::uint64_t number = ++recorded->asked;
  enqueue(device, stream, {{}, [=] {
                             recorded->happened = std::max(recorded->happened, number);
                             recorded->time = std::chrono::steady_clock::now();
                           }});
}

void EmulatedRuntime::wait(const Event& event, int device, Stream stream) {
  std::lock_guard lock(mutex_);
  check(device);
  ++counts_.waits;
  if (lose_wait_after_ >= 0 && lose_wait_after_-- == 0) return;
  auto recorded = static_cast<const EmulatedEvent&>(event).recorded;
  std::uint64_t number = recorded->asked;
  enqueue(device, stream, {[=] { return recorded->happened >= number; }, {}});
}

bool EmulatedRuntime::over(const Event& event) {
  std::lock_guard lock(mutex_);
  const auto& emulated = static_cast<const EmulatedEvent&>(event);
  check_not_broken(emulated.device);
  if (!held_) step();
  const auto& recorded = emulated.recorded;
  return recorded->happened == recorded->asked;
}

double EmulatedRuntime::seconds_between(const Event& first, const Event& second) {
  std::lock_guard lock(mutex_);
  const auto& begin = static_cast<const EmulatedEvent&>(first);
  const auto& end = static_cast<const EmulatedEvent&>(second);
  for (const auto* event : {&begin, &end}) {
    if (!event->timed || event->recorded->happened != event->recorded->asked) {
      throw std::runtime_error("an event was not timed, or has not happened");
    }
  }
  return std::chrono::duration<double>(end.recorded->time - begin.recorded->time).count();
}

void EmulatedRuntime::copy(void* target, int target_device, const void* source, int source_device,
                           std::size_t bytes, Stream stream) {
  std::lock_guard lock(mutex_);
  check(target_device);
  check(source_device);
  ++counts_.copies;
  enqueue(target_device, stream, {{}, [=] { std::memmove(target, source, bytes); }, true});
}

void EmulatedRuntime::combine(DType dtype, Op op, void* const* targets, int num_targets,
                              const void* const* sources, int num_sources, std::size_t count,
                              int size, int device, Stream stream) {
  std::lock_guard lock(mutex_);
  check(device);
  if (num_targets < 1 || num_targets > kMaxArrays || num_sources < 1 || num_sources > kMaxArrays) {
    throw std::runtime_error("a launch takes 1 to " + std::to_string(kMaxArrays) + " arrays");
  }
  ++counts_.combinations;
  std::vector<void*> to(targets, targets + num_targets);
  std::vector<const void*> from(sources, sources + num_sources);
  for (const void* memory : to) check_reach(device, memory);
  for (const void* memory : from) check_reach(device, memory);
  enqueue(device, stream,
          {{},
           [=] {
             combine_many(dtype, op, to.data(), to.size(), from.data(), from.size(), count, size);
           },
           true});
}

void EmulatedRuntime::pack(void* packed, DType packed_type, const std::vector<Piece>& pieces,
                           DType piece_type, double scale, int device, Stream stream) {
  convert(packed, packed_type, pieces, piece_type, scale, true, device, stream);
}

void EmulatedRuntime::unpack(const void* packed, DType packed_type,
                             const std::vector<Piece>& pieces, DType piece_type, double scale,
                             int device, Stream stream) {
  convert(packed, packed_type, pieces, piece_type, scale, false, device, stream);
}

void EmulatedRuntime::convert(const void* packed, DType packed_type,
                              const std::vector<Piece>& pieces, DType piece_type, double scale,
                              bool packs, int device, Stream stream) {
  std::lock_guard lock(mutex_);
  check(device);
  ++counts_.packs;
  auto* whole = static_cast<std::byte*>(const_cast<void*>(packed));
  auto work = [=] {
    std::size_t whole_item = item_size(packed_type), item = item_size(piece_type);
    const Access& of_whole = kAccess[static_cast<int>(packed_type)];
    const Access& of_piece = kAccess[static_cast<int>(piece_type)];
    for (const Piece& piece : pieces) {
      auto* there = static_cast<std::byte*>(piece.address);
      std::byte* here = whole + piece.offset * whole_item;
      if (packed_type == piece_type && scale == 1) {
        std::memcpy(packs ? here : there, packs ? there : here, piece.count * item);
        continue;
      }
      for (std::size_t i = 0; i < piece.count; ++i) {
        if (packs) {
          of_whole.store(here + i * whole_item, of_piece.load(there + i * item) * scale);
        } else {
          of_piece.store(there + i * item, of_whole.load(here + i * whole_item) * scale);
        }
      }
    }
  };
  enqueue(device, stream, {{}, work, true});
}

void EmulatedRuntime::own(int device, const void* memory, std::size_t bytes) {
  std::lock_guard lock(mutex_);
  owners_[static_cast<const std::byte*>(memory)] = {bytes, device};
}

void EmulatedRuntime::run() {
  std::lock_guard lock(mutex_);
  while (step()) {
  }
  for (const auto& [name, lane] : lanes_) {
    if (!lane.tasks.empty()) throw std::logic_error("streams wait for each other");
  }
}

void EmulatedRuntime::hold(bool on) {
  std::lock_guard lock(mutex_);
  held_ = on;
}

void EmulatedRuntime::fail_after(int calls) {
  std::lock_guard lock(mutex_);
  fail_after_ = calls;
}

void EmulatedRuntime::lose_wait_after(int waits) {
  std::lock_guard lock(mutex_);
  lose_wait_after_ = waits;
}

void EmulatedRuntime::break_device(int device) {
  std::lock_guard lock(mutex_);
  broken_.insert(device);
}

EmulatedRuntime::Counts EmulatedRuntime::counts() {
  std::lock_guard lock(mutex_);
  return counts_;
}

}  // namespace pycollective::device
