#include "transport/shm.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "support/cores.h"
#include "transport/ring_pipes.h"
#include "transport/shm_endpoint.h"

namespace pycollective {

namespace {

float microseconds_since(Clock::time_point began) {
  return std::chrono::duration<float, std::micro>(Clock::now() - began).count();
}

void lower(std::atomic<float>& time, float took) {
  const float before = time.load();
  if (before == 0 || took < before) time.store(took);
}

// The class of a size in CopyTimes: powers of two.
int copy_class(std::size_t bytes) {
  return std::min<int>(std::bit_width(bytes / kCopyTrialBytes), kCopySizes) - 1;
}

// The calls from one trial of all ways to the next one.
int copy_period(int size_class) {
  return static_cast<int>(
      std::max(kCopyPeriodBytes / (kCopyTrialBytes << size_class), kLeastCopyPeriod));
}

// The calls at the beginning of a period that are not timed. They fill the rings: a ring that was
// not used lately is written faster, and its time would mislead.
int untimed_calls(int size_class) {
  return static_cast<int>(2 * kMostStagingBytes / (kCopyTrialBytes << size_class));
}

}  // namespace

std::shared_ptr<ShmGroup> ShmGroup::create(int size, std::size_t arena) {
  return std::make_shared<ShmGroup>(ShmMemory::create(size, arena));
}

std::shared_ptr<ShmGroup> ShmGroup::open(int descriptor) {
  return std::make_shared<ShmGroup>(ShmMemory::open(descriptor));
}

ShmGroup::ShmGroup(ShmMemory memory)
    : secret_(std::uint64_t{std::random_device{}()} << 32 | std::random_device{}()),
      memory_(std::move(memory)) {}

ShmGroup::~ShmGroup() {
  if (rank_ >= 0) leave(rank_);
}

std::shared_ptr<Pipes> ShmGroup::pipes(int rank) {
  return std::make_shared<RingPipes>(memory_.pipes(), size(), rank, endpoint(rank).board());
}

bool ShmGroup::has_left(int rank) const {
  return state(rank).presence.load() >= Presence::left || has_ended(rank);
}

bool ShmGroup::has_ended(int rank) const {
  if (state(rank).presence.load() == Presence::ended) return true;
  const int theirs = state(rank).number_in_followed.load() - 1;
  return followed_ && theirs >= 0 && theirs < followed_->size() && followed_->has_ended(theirs);
}

void ShmGroup::join(int rank) {
  if (rank < 0 || rank >= size()) {
    throw std::invalid_argument("rank " + std::to_string(rank) + " is not among the " +
                                std::to_string(size()) + " ranks of the group");
  }
  auto absent = Presence::absent;
  if (rank_ >= 0 || !state(rank).presence.compare_exchange_strong(absent, Presence::joined)) {
    throw std::invalid_argument(
        "rank " + std::to_string(rank) +
        " of the group belongs to another process: every process needs its own rank");
  }
  rank_ = rank;
  state(rank).memory = {process_number(), reinterpret_cast<std::uintptr_t>(&secret_), secret_};
  if (followed_) state(rank).number_in_followed.store(followed_->rank_ + 1);
  state(rank).queue.prepare();
  const CoreSet cores = affinity();
  for (std::size_t word = 0; word < cores.size(); ++word)
    memory_.header().cores[word].fetch_or(cores[word]);
  memory_.populate_board();
  map_arenas();
  endpoint_ = std::make_unique<ShmEndpoint>(*this, rank);
}

void ShmGroup::map_arenas() {
  std::int32_t index = rank_;
  if (followed_) {
    arena_ = followed_->arena_;
    index = followed_->arena_of(followed_->rank_);
  } else if (memory_.arena_bytes() > 0) {
    try {
      arena_ = Arena::map(memory_.descriptor(), memory_.arenas_begin(), memory_.arena_bytes(),
                          size(), rank_);
    } catch (const std::system_error&) {
      // Too little address space: all arrays of the group are ordinary.
    }
  }
  state(rank_).arena.store(arena_ ? index + 1 : -1);
}

int ShmGroup::arena_of(int rank) const { return state(rank).arena.load() - 1; }

bool ShmGroup::all_mapped() const {
  if (int known = all_mapped_.load(std::memory_order_relaxed); known >= 0) return known != 0;
  bool all_joined = true, all_map = true;
  for (int r = 0; r < size(); ++r) {
    all_joined = all_joined && state(r).arena.load() != 0;
    all_map = all_map && arena_of(r) >= 0;
  }
  if (all_joined) all_mapped_.store(all_map, std::memory_order_relaxed);
  return all_joined && all_map;
}

std::uint64_t ShmGroup::handle_of(const void* data, std::size_t bytes) const {
  return arena_ && all_mapped() ? arena_->handle_of(data, bytes) : 0;
}

std::byte* ShmGroup::address_of(int rank, std::uint64_t handle, std::size_t bytes) const {
  return arena_ ? arena_->address_of(arena_of(rank), handle, bytes) : nullptr;
}

void ShmGroup::test_remote_reads() {
  if (state(rank_).reads.load(std::memory_order_relaxed) != 0) return;
  std::int32_t found = 1;
  for (int r = 0; r < size(); ++r) {
    if (state(r).arena.load() == 0) return;  // not joined yet
    std::byte secret[sizeof secret_];
    if (!read_remote(r, state(r).memory.secret_at, secret, sizeof secret)) found = -1;
  }
  state(rank_).reads.store(found);
}

std::atomic<float>& ShmGroup::copy_time(int rank, int kind, int size_class, CopyWay way) const {
  return state(rank).copy_times[kind][size_class][static_cast<int>(way)];
}

// Each rank counts its calls. So all ranks try the same way at the same time, if they make the same
// calls.
ShmGroup::CopyTrial ShmGroup::next_copy(int kind, std::size_t bytes, CopyWay last) {
  const int size_class = copy_class(bytes);
  CopyChoice& choice = choices_[kind][size_class];
  const int begin = untimed_calls(size_class);
  const std::uint64_t retry = memory_.header().copy_retries[kind][size_class].load();
  const bool tries_again = retry > choice.retry && choice.calls >= retry;
  if (tries_again) {
    choice.retry = retry;
    choice.turn = begin;
    choice.slow = 0;
  }
  ++choice.calls;
  const int turn = choice.turn;
  choice.turn = (turn + 1) % copy_period(size_class);
  if (turn == 0 || tries_again) {
    for (int r = 0; r < size(); ++r) {
      // A call's ranks time themselves. A message's sender chooses by the times of its receivers.
      if (kind != kMessageCopies && r != rank_) continue;
      for (auto& time : state(r).copy_times[kind][size_class]) time.store(0);
    }
  }
  if (turn < begin) return {CopyWay::plain, false, false};
  const int trial = turn - begin;
  if (trial == kCopyWays * kCopyTrials) choice.way = fastest(kind, size_class);
  const bool is_trial = trial < kCopyWays * kCopyTrials;
  const CopyWay way = is_trial ? static_cast<CopyWay>(trial / kCopyTrials) : choice.way;
  if (way > last) return {CopyWay::plain, false, false};
  const bool is_checked = trial >= kCopyWays * kCopyTrials + kCopyRest && trial % kCopyCheck == 0;
  return {way, is_trial && trial % kCopyTrials >= kCopyWarmups, is_checked};
}

// The way for which the slowest rank took less time than for the others.
CopyWay ShmGroup::fastest(int kind, int size_class) const {
  CopyWay best = CopyWay::plain;
  for (const CopyWay way : {CopyWay::past_cache, CopyWay::remote_read}) {
    float with_best = 0, with_way = 0;
    for (int r = 0; r < size(); ++r) {
      const float before = copy_time(r, kind, size_class, best).load();
      const float now = copy_time(r, kind, size_class, way).load();
      if (before == 0 || now == 0) continue;
      with_best = std::max(with_best, before);
      with_way = std::max(with_way, now);
    }
    if (with_way < with_best) best = way;
  }
  return best;
}

CopyWay ShmGroup::begin_long_call(Collective collective, std::size_t bytes, CopyWay last) {
  copy_ = {CopyWay::plain, false, false};
  if (bytes < kCopyTrialBytes) return copy_.way;
  test_remote_reads();
  if (last == CopyWay::plain) return copy_.way;
  kind_ = static_cast<int>(collective);
  bytes_ = bytes;
  if (!all_read_remotely()) last = CopyWay::past_cache;
  copy_ = next_copy(kind_, bytes, last);
  return copy_.way;
}

void ShmGroup::end_long_call(Clock::time_point began) {
  if (!copy_.is_timed && !copy_.is_checked) return;
  const int size_class = copy_class(bytes_);
  std::atomic<float>& time = copy_time(rank_, kind_, size_class, copy_.way);
  const float took = microseconds_since(began);
  if (copy_.is_timed) return lower(time, took);
  CopyChoice& choice = choices_[kind_][size_class];
  const bool is_slow = time.load() > 0 && took > kSlowCopy * time.load();
  choice.slow = is_slow ? choice.slow + 1 : 0;
  if (choice.slow < kSlowCopies) return;
  choice.slow = 0;
  // The others may have begun the next call.
  memory_.header().copy_retries[kind_][size_class].store(choice.calls + 1);
}

CopyWay ShmGroup::begin_long_message(int to, std::size_t bytes) {
  if (bytes < kCopyTrialBytes) return CopyWay::plain;
  const bool can_read = state(to).reads.load(std::memory_order_relaxed) == 1;
  return next_copy(kMessageCopies, bytes, can_read ? CopyWay::remote_read : CopyWay::past_cache)
      .way;
}

void ShmGroup::end_long_message(std::size_t bytes, CopyWay way, Clock::time_point began) {
  if (bytes < kCopyTrialBytes) return;
  test_remote_reads();
  lower(copy_time(rank_, kMessageCopies, copy_class(bytes), way), microseconds_since(began));
}

bool ShmGroup::all_read_remotely() const {
  for (int r = 0; r < size(); ++r) {
    if (state(r).reads.load(std::memory_order_relaxed) != 1) return false;
  }
  return true;
}

std::uint64_t ShmGroup::remote_address(const void* data) const {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  std::byte first;
  return data && read_remote(rank_, address, &first, 1) ? address : 0;
}

bool ShmGroup::read_remote(int rank, std::uint64_t address, std::byte* to,
                           std::size_t bytes) const {
  return read_peer(state(rank).memory, address, to, bytes);
}

void ShmGroup::leave(int rank) noexcept {
  if (!origin_.is_here()) return;  // a forked child is not the rank
  const auto now = rank == rank_ ? Presence::left : Presence::ended;
  // A rank that has not joined leaves too.
  if (state(rank).presence.exchange(now) >= Presence::left) return;
  wake_all();
  for (int peer = 0; endpoint_ && rank == rank_ && peer < size(); ++peer) {
    if (peer == rank || !endpoint_->differs(peer) || has_failed()) continue;
    fail(endpoint_->mismatch_with(peer));
  }
}

// Counts the cores of all ranks, because a launcher may give each rank its own cores.
bool ShmGroup::is_oversubscribed() const {
  if (int known = oversubscribed_.load(std::memory_order_relaxed); known >= 0) return known != 0;
  bool all = true;
  for (int r = 0; r < size(); ++r) all = all && state(r).presence.load() != Presence::absent;
  CoreSet cores;
  for (std::size_t word = 0; word < cores.size(); ++word)
    cores[word] = memory_.header().cores[word].load();
  static const double quota = quota_of_cores();
  bool oversubscribed = size() > within_quota(count_of(cores), quota);
  if (all) oversubscribed_.store(oversubscribed, std::memory_order_relaxed);
  return oversubscribed;
}

std::vector<int> ShmGroup::needing_fences() const {
  std::vector<int> found;
  for (int r = 0; r < size(); ++r) {
    if (state(r).queue.interrupts.load() == 0) found.push_back(r);
  }
  return found;
}

bool ShmGroup::is_in(int rank) const { return state(rank).presence.load() == Presence::joined; }

Endpoint& ShmGroup::endpoint(int rank) {
  if (rank != rank_) throw std::logic_error("this process has another rank of the group");
  return *endpoint_;
}

void ShmGroup::fail(const Failure& failure) noexcept {
  std::uint32_t whole = 0;
  if (!origin_.is_here() || !memory_.header().failed.compare_exchange_strong(whole, 1)) return;
  // A lost rank of the followed group is recorded without a call, so that each rank adds its own.
  std::optional<Failure> theirs;
  try {
    theirs = failure_of_followed();
  } catch (const std::bad_alloc&) {  // then all ranks name the call of this one
  }
  const bool is_theirs =
      theirs && failure.kind == theirs->kind && failure.ranks() == theirs->ranks();
  memory_.header().reason = record_of(is_theirs ? *theirs : failure);
  memory_.header().failed.store(2);
  wake_all();
}

void ShmGroup::wake_all() noexcept {
  for (int r = 0; r < size(); ++r) {
    if (state(r).queue.wake()) end_poll(r);
  }
}

std::optional<Failure> ShmGroup::failure() const {
  std::optional<Failure> found = has_failed() ? recorded_failure() : failure_of_followed();
  if (!found || found->kind != FailureKind::peer_lost || !found->calls().empty()) return found;
  // The launcher has detected the lost rank, and is in no call: this rank's call was interrupted.
  const std::string call = own_call();
  return call.empty() ? found : found->with_call(call);
}

std::optional<Failure> ShmGroup::failure_of_followed() const {
  if (!followed_) return {};
  auto theirs = followed_->failure();
  if (!theirs || theirs->kind != FailureKind::peer_lost) return {};
  std::vector<int> members;
  for (int r = 0; r < size(); ++r) members.push_back(state(r).number_in_followed.load() - 1);
  return failure_for_part(*theirs, members);
}

Failure ShmGroup::recorded_failure() const {
  // Waits for the rank that writes the reason. That rank may have been killed meanwhile.
  auto deadline = Clock::now() + std::chrono::seconds(1);
  while (memory_.header().failed.load() != 2) {
    if (Clock::now() > deadline) {
      return {FailureKind::aborted,
              "a rank ended while it wrote the reason of the group's failure"};
    }
    std::this_thread::yield();
  }
  const auto ranks = names_.empty() ? size() : static_cast<int>(addresses_.size());
  auto reason = failure_in(memory_.header().reason, ranks);
  if (!reason)
    return {FailureKind::aborted, "a rank wrote an invalid reason for the group's failure"};
  return addresses_.empty() ? *reason : reason->with_hosts(addresses_);
}

std::string ShmGroup::own_call() const {
  if (rank_ < 0) return {};
  const ShmRank& me = state(rank_);
  return me.busy.load() ? me.history.call(me.history.number()).describe() : message_of(rank_);
}

void ShmGroup::check() const {
  if (memory_.header().failed.load(std::memory_order_relaxed) == 0) return;
  throw *failure();
}

void ShmGroup::announce_message(int rank, const std::string& message) noexcept {
  if (origin_.is_here()) set_name(state(rank).message, message);
}

std::uint64_t ShmGroup::calls(int rank) const { return state(rank).history.number(); }

void ShmGroup::send_heartbeat() {
  if (rank_ < 0 || !origin_.is_here()) return;
  std::lock_guard lock(heartbeats_mutex_);
  state(rank_).heartbeats.fetch_add(1);
  heartbeats_.resize(static_cast<std::size_t>(size()), {0, Clock::now()});
  receive_heartbeats();
}

// Called with the mutex held.
void ShmGroup::receive_heartbeats() {
  auto now = Clock::now();
  for (std::size_t r = 0; r < heartbeats_.size(); ++r) {
    int rank = static_cast<int>(r);
    std::uint64_t heartbeats = state(rank).heartbeats.load();
    if (heartbeats != heartbeats_[r].heartbeats || has_left(rank))
      heartbeats_[r] = {heartbeats, now};
  }
}

std::vector<int> ShmGroup::silent(double seconds) {
  std::vector<int> found;
  std::lock_guard lock(heartbeats_mutex_);
  receive_heartbeats();
  auto now = Clock::now();
  for (std::size_t r = 0; r < heartbeats_.size(); ++r) {
    int rank = static_cast<int>(r);
    if (rank == rank_ || std::chrono::duration<double>(now - heartbeats_[r].at).count() <= seconds)
      continue;
    found.push_back(rank);
  }
  return found;
}

std::string ShmGroup::describe(int rank) const {
  const ShmRank& of = state(rank);
  if (of.presence.load() == Presence::absent) {
    return title(rank) + " has not joined yet";
  }
  return describe_rank(title(rank), of.busy.load() != 0, of.history.call(of.history.number()),
                       message_of(rank));
}

std::string ShmGroup::message_of(int rank) const {
  char message[sizeof state(rank).message];
  std::memcpy(message, state(rank).message, sizeof message);
  message[sizeof message - 1] = 0;
  return message;
}

bool ShmGroup::has_failed() const { return memory_.header().failed.load() != 0; }

}  // namespace pycollective
