#include "transport/shm.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "support/cores.h"
#include "support/tuning.h"
#include "support/wait_queue.h"
#include "transport/ring_pipes.h"

namespace pycollective {
namespace {

constexpr std::uint64_t kMagic = 0x6576697463656c6f;  // "olective"
constexpr std::uint32_t kVersion = 9;
constexpr std::size_t kPage = 4096;
constexpr int kMaxRanks = 1024;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kMaxArenas = std::size_t{1} << 45;  // of the 2^47 bytes that a process has
// Calls of a rank that are remembered: a sender may be as many messages ahead as a channel has
// slots.
constexpr std::uint64_t kHistory = CallHistory::kLength;
static_assert(kHistory >= kShmSlots + 2);

std::size_t page_up(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
// Where the arenas lie, behind a group of so many bytes.
std::uint64_t arenas_begin(std::size_t bytes) {
  return (bytes + kHugePage - 1) / kHugePage * kHugePage;
}
std::uint64_t bytes_with_arenas(std::size_t bytes, int size, std::uint64_t arena) {
  return arenas_begin(bytes) + arena * static_cast<std::uint64_t>(size);
}

// A new record is written only when a call differs from the one before; more are kept than calls.
constexpr std::uint64_t kRecords = kHistory + 2;

}  // namespace

struct ShmGroup::Header {
  std::uint64_t magic;
  std::uint32_t version;
  std::int32_t size;
  std::uint64_t bytes;
  std::uint64_t arena;                                           // bytes of each rank's
  std::atomic<std::uint64_t> cores[std::tuple_size_v<CoreSet>];  // of all ranks that have joined
  std::atomic<std::uint32_t> failed;                             // 0: no, 1: being written, 2: yes
  std::uint32_t kind;
  char message[2000];
};

// Only the launcher says that a process has ended, of one that ends without an error.
enum class Presence : std::uint32_t { absent, joined, left, ended };

struct alignas(kCacheLine) ShmGroup::RankState {
  WaitQueue queue;
  alignas(kCacheLine) std::atomic<Presence> presence;
  std::atomic<std::uint32_t> busy;
  std::atomic<std::uint64_t> beats;
  // One more than its place among the arenas; 0: not known yet, -1: the rank has not mapped them.
  std::atomic<std::int32_t> arena;
  std::atomic<std::int32_t> there;  // one more than its number in the followed group; 0: not known
  char message[160];                // between two ranks, in which it waits; only for texts
  // Readers look at `writing` before and after: odd or changed means that they must look again.
  alignas(kCacheLine) std::atomic<std::uint64_t> writing;
  std::atomic<std::uint64_t> number;               // of the last call
  std::atomic<std::uint64_t> record_of[kHistory];  // by a call's number, before `number` says so
  std::atomic<std::uint64_t> fingerprint_of[kHistory];
  CallRecord records[kRecords];
};

struct alignas(kCacheLine) ShmGroup::Channel {
  struct alignas(kCacheLine) Slot {
    std::uint64_t fingerprint;
    std::uint64_t call;       // its number
    std::uint64_t remaining;  // bytes of the message, this part's and those to come
    std::uint64_t bytes;      // of this part
    union {
      std::byte inline_data[kShmInlineBytes];
      std::uint64_t place;  // of longer ones: 0 in the ring, else where in the arena it is lent
    };
  };
  std::atomic<std::uint64_t> posted;  // parts, ever
  alignas(kCacheLine) std::atomic<std::uint64_t> taken;
  Slot slots[kShmSlots];
};

class ShmBoard final : public Board {
 public:
  explicit ShmBoard(ShmEndpoint& endpoint);
  std::uint64_t place_of(const void* data, std::size_t bytes) const override;
  std::byte* reach(int peer, std::uint64_t place, std::size_t bytes) override;
  bool in_crowd() const override;
  [[noreturn]] void mismatch(int peer) override;

 private:
  ShmEndpoint& endpoint_;
};

class ShmEndpoint final : public Endpoint {
 public:
  ShmEndpoint(ShmGroup& group, int rank)
      : group_(group),
        rank_(rank),
        pending_(static_cast<std::size_t>(group.size())),
        lent_until_(static_cast<std::size_t>(group.size())),
        board_(*this) {}

  int rank() const override { return group_.name(rank_); }

  void enter(const CallRecord& call) override {
    auto& me = state();
    if (me.busy.exchange(1)) {
      throw std::logic_error("rank " + std::to_string(rank_) +
                             " is already in a collective call in another thread; a rank makes one "
                             "call at a time");
    }
    std::uint64_t number = me.number.load(std::memory_order_relaxed) + 1;
    if (call.identity != call_.identity || number == 1) {
      call_ = call;
      me.writing.fetch_add(1);
      me.records[++record_ % kRecords] = call;
      me.writing.fetch_add(1);
    }
    call_.number = number;
    fingerprint_ = call_.fingerprint = fingerprint_after(fingerprint_, call_.identity);
    board_.fingerprint = fingerprint_;
    me.record_of[number % kHistory].store(record_, std::memory_order_relaxed);
    me.fingerprint_of[number % kHistory].store(fingerprint_, std::memory_order_relaxed);
    me.number.store(number, std::memory_order_release);
  }

  void leave() noexcept override {
    if (group_.has_failed()) withdraw();
    if (unsent_ > 0) {  // after a failure
      for (Pending& pending : pending_) pending = {};
      unsent_ = 0;
    }
    lends_ = false;
    board_.written = {};
    state().busy.store(0, std::memory_order_release);
  }

  bool try_send(int peer, const void* data, std::size_t bytes) override {
    Pending& pending = pending_[static_cast<std::size_t>(peer)];
    if (pending.active && !push(peer)) return false;
    std::uint64_t place = bytes >= kShmLentBytes ? group_.place_of(data, bytes) : 0;
    pending = {static_cast<const std::byte*>(data), bytes, place, true};
    ++unsent_;
    push(peer);
    return true;
  }

  Piece try_receive(int peer, std::size_t remaining) override {
    auto& channel = group_.channel(peer, rank_);
    std::uint64_t taken = channel.taken.load(std::memory_order_relaxed);
    if (channel.posted.load(std::memory_order_acquire) == taken) return {};
    const auto& slot = channel.slots[taken % kShmSlots];
    if (slot.fingerprint != fingerprint_ || slot.remaining != remaining || slot.bytes > remaining) {
      mismatch(peer);
    }
    if (slot.bytes <= kShmInlineBytes) return {slot.inline_data, slot.bytes};
    if (slot.place) {
      const std::byte* lent = group_.reach(peer, slot.place, slot.bytes);
      if (!lent) lose(peer);
      return {lent, slot.bytes};
    }
    return {group_.slots(peer, rank_) + taken % kShmSlots * kShmSlotBytes, slot.bytes};
  }

  void release(int peer) override {
    auto& channel = group_.channel(peer, rank_);
    std::uint64_t taken = channel.taken.load(std::memory_order_relaxed);
    const auto& slot = channel.slots[taken % kShmSlots];
    if (slot.bytes > kShmInlineBytes && slot.place) {
      // A sender that gave up may have overwritten what was being read: it fails the group first.
      std::atomic_thread_fence(std::memory_order_acquire);
      group_.check();
    }
    channel.taken.store(taken + 1, std::memory_order_release);
    ++moved_;
    wake(peer);
  }

  std::uint64_t moved() const override { return moved_; }

  void progress() override {
    for (int peer = 0; unsent_ > 0 && peer < group_.size(); ++peer) {
      if (pending_[static_cast<std::size_t>(peer)].active) push(peer);
    }
  }

  // Copied into the ring is as good as read; what is lent is not.
  bool flushed() override {
    if (unsent_ > 0) return false;
    for (int peer = 0; lends_ && peer < group_.size(); ++peer) {
      if (!has_read(peer)) return false;
    }
    lends_ = false;
    return true;
  }
  bool flushed_to(int peer) override {
    return !pending_[static_cast<std::size_t>(peer)].active && has_read(peer);
  }

  void check() override { group_.check(); }
  void fail(FailureKind kind, const std::string& message) noexcept override {
    group_.fail(kind, message);
  }
  Board* board() override { return &board_; }

  SpinLimit spin_limit() override { return memory_spin_limit(group_.in_crowd()); }
  void announce_sleep() override { seen_ = state().queue.announce_sleep(); }
  bool sleep(Clock::duration limit) override {
    return has_failed() || state().queue.sleep(seen_, limit);
  }
  void end_sleep() override { state().queue.end_sleep(); }
  bool has_failed() override { return group_.has_failed(); }

  // Fails the group where a peer is in a call that does not belong to this rank's, or has left.
  void look_up() override {
    if (auto lost = group_.failure()) group_.fail(lost->kind, lost->what());  // of the followed one
    for (int peer = 0; peer < group_.size(); ++peer) {
      if (peer == rank_) continue;
      const auto& other = group_.state(peer);
      if (differs(peer)) mismatch(peer);
      // A process may have ended in the middle of a call.
      bool gone =
          group_.has_left(peer) && (other.number.load() < call_.number || other.busy.load() != 0);
      if (gone) {
        group_.fail(FailureKind::peer_lost, describe_absence(group_.name(peer), other.number.load(),
                                                             group_.name(rank_), call_));
        group_.check();
      }
    }
  }

  // Whether the calls of a peer and of this rank are not the same, as far as both have come.
  bool differs(int peer) const {
    std::uint64_t last = std::min(call_.number, group_.calls(peer));
    if (last == 0) return false;
    CallRecord mine = group_.call_of(rank_, last), theirs = group_.call_of(peer, last);
    return mine.number == theirs.number && mine.fingerprint != theirs.fingerprint;
  }

  std::string describe_mismatch_with(int peer) const {
    return describe_mismatch(group_.name(rank_), group_.calls_of(rank_), group_.name(peer),
                             group_.calls_of(peer));
  }

 private:
  friend class ShmBoard;
  // A message, or the rest of one, that is still to be copied into the channel.
  struct Pending {
    const std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::uint64_t place = 0;  // where the peer reaches it, if it does
    bool active = false;
  };

  Group& group() override { return group_; }
  ShmGroup::RankState& state() { return group_.state(rank_); }
  void wake(int peer) { group_.state(peer).queue.wake_if_asleep(); }

  // Whether a peer has read all that it was lent.
  bool has_read(int peer) const {
    return group_.channel(rank_, peer).taken.load(std::memory_order_acquire) >=
           lent_until_[static_cast<std::size_t>(peer)];
  }

  // Copies what there is room for; true when nothing is left to send to this peer.
  bool push(int peer) {
    Pending& pending = pending_[static_cast<std::size_t>(peer)];
    auto& channel = group_.channel(rank_, peer);
    std::uint64_t posted = channel.posted.load(std::memory_order_relaxed);
    const std::uint64_t before = posted;
    // The peer may take parts as fast as this rank posts them.
    const std::uint64_t most = posted + std::max<std::uint64_t>(kPieceBytes / kShmSlotBytes, 1);
    while (pending.active && posted < most &&
           posted - channel.taken.load(std::memory_order_acquire) < std::uint64_t{kShmSlots}) {
      auto& slot = channel.slots[posted % kShmSlots];
      std::size_t part = pending.place ? pending.bytes : std::min(pending.bytes, kShmSlotBytes);
      slot.fingerprint = fingerprint_;
      slot.call = call_.number;
      slot.remaining = pending.bytes;
      slot.bytes = part;
      std::byte* target = slot.inline_data;
      if (part > kShmInlineBytes) {
        slot.place = pending.place;
        target = group_.slots(rank_, peer) + posted % kShmSlots * kShmSlotBytes;
      }
      if (pending.place) {
        lent_until_[static_cast<std::size_t>(peer)] = posted + 1;
        lends_ = true;
      } else if (part) {
        std::memcpy(target, pending.data, part);
      }
      channel.posted.store(++posted, std::memory_order_release);
      pending.data += part;
      pending.bytes -= part;
      pending.active = pending.bytes > 0;
    }
    if (posted == before) return !pending.active;
    moved_ += posted - before;
    wake(peer);
    if (!pending.active) --unsent_;
    return !pending.active;
  }

  // After a failure the memory is the caller's again: none of the peers may write to it any more.
  // A peer that says that it writes goes on for one piece at most. If it does not end that in time,
  // it was stopped or killed, and what it may still write is to reach nobody.
  void withdraw() noexcept {
    if (!board_.written.bytes) return;
    std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with Reaching, in direct.cc
    auto patience = Clock::now() + kWithdrawal;
    while (board_.is_reached()) {
      if (Clock::now() > patience) {
        group_.arena_->detach(board_.written.data, board_.written.bytes);
        break;
      }
      std::this_thread::yield();
    }
  }

  [[noreturn]] void lose(int peer) {
    group_.fail(FailureKind::peer_lost, "rank " + std::to_string(group_.name(peer)) +
                                            " names memory that the group does not have, to rank " +
                                            std::to_string(group_.name(rank_)));
    group_.check();
    throw std::logic_error("unreachable");
  }

  [[noreturn]] void mismatch(int peer) {
    group_.fail(FailureKind::mismatch, describe_mismatch_with(peer));
    group_.check();
    throw std::logic_error("unreachable");
  }

  ShmGroup& group_;
  int rank_;
  CallRecord call_;
  std::uint64_t record_ = 0;  // the last that was written
  std::uint64_t fingerprint_ = 0;
  std::uint64_t moved_ = 0;  // parts, of messages that came or went
  std::uint32_t seen_ = 0;   // wake-ups before the sleep
  std::vector<Pending> pending_;
  int unsent_ = 0;  // peers with something pending
  // Parts of each channel that must be taken before all is read that was lent to the peer; whether
  // something was lent that may not have been read.
  std::vector<std::uint64_t> lent_until_;
  bool lends_ = false;
  ShmBoard board_;
};

ShmBoard::ShmBoard(ShmEndpoint& endpoint)
    : Board(endpoint.group_.board(), endpoint.rank_, endpoint.group_.queues(),
            /*with_staging=*/true),
      endpoint_(endpoint) {}

std::uint64_t ShmBoard::place_of(const void* data, std::size_t bytes) const {
  return endpoint_.group_.place_of(data, bytes);
}

std::byte* ShmBoard::reach(int peer, std::uint64_t place, std::size_t bytes) {
  std::byte* found = endpoint_.group_.reach(peer, place, bytes);
  if (!found) endpoint_.lose(peer);
  return found;
}

bool ShmBoard::in_crowd() const { return endpoint_.group_.in_crowd(); }

void ShmBoard::mismatch(int peer) { endpoint_.mismatch(peer); }

std::size_t ShmGroup::bytes_for(int size) {
  auto n = static_cast<std::size_t>(size);
  return page_up(sizeof(Header)) + page_up(n * sizeof(RankState)) +
         page_up(n * n * sizeof(Channel)) + n * n * kShmSlots * kShmSlotBytes +
         Board::bytes_for(size, /*with_staging=*/true) + page_up(RingPipes::bytes_for(size));
}

std::byte* ShmGroup::board() const {
  return mapping_.data() + bytes_for(size()) - page_up(RingPipes::bytes_for(size())) -
         Board::bytes_for(size(), /*with_staging=*/true);
}

std::vector<WaitQueue*> ShmGroup::queues() const {
  std::vector<WaitQueue*> queues;
  for (int r = 0; r < size(); ++r) queues.push_back(&state(r).queue);
  return queues;
}

std::shared_ptr<ShmGroup> ShmGroup::create(int size, std::size_t arena) {
  if (size < 1 || size > kMaxRanks) {
    throw std::invalid_argument("a group of processes has 1 to " + std::to_string(kMaxRanks) +
                                " ranks, not " + std::to_string(size));
  }
  arena = std::min(arena, kMaxArenas / static_cast<std::size_t>(size)) / kHugePage * kHugePage;
  SharedMemory memory = [&] {
    try {
      return SharedMemory::create(bytes_with_arenas(bytes_for(size), size, arena));
    } catch (const std::system_error&) {  // files may not be so long
      arena = 0;
      return SharedMemory::create(bytes_with_arenas(bytes_for(size), size, 0));
    }
  }();
  Mapping mapping = memory.map(0, bytes_for(size));
  // The memory is zero: what the atomics start with.
  auto* header = new (mapping.data()) Header;
  header->version = kVersion;
  header->size = size;
  header->bytes = bytes_for(size);
  header->arena = arena;
  header->failed.store(0);
  header->magic = kMagic;
  return std::shared_ptr<ShmGroup>(
      new ShmGroup(std::move(memory), std::move(mapping), size, arena));
}

std::shared_ptr<ShmGroup> ShmGroup::open(int descriptor) {
  auto refuse = [descriptor] {
    throw std::invalid_argument("descriptor " + std::to_string(descriptor) +
                                " is not the memory of a group of this version of pycollective");
  };
  SharedMemory memory = SharedMemory::open(descriptor);
  std::size_t bytes = memory.size();
  if (bytes < sizeof(Header)) refuse();
  Mapping first = memory.map(0, page_up(sizeof(Header)));
  const auto* header = reinterpret_cast<const Header*>(first.data());
  // Kept as it was checked: another process may write to the header.
  const int size = header->size;
  const std::uint64_t arena = header->arena;
  bool whole = header->magic == kMagic && header->version == kVersion && size >= 1 &&
               size <= kMaxRanks && header->bytes == bytes_for(size) &&
               arena <= kMaxArenas / static_cast<std::size_t>(size) &&
               bytes == bytes_with_arenas(bytes_for(size), size, arena);
  if (!whole) refuse();
  Mapping mapping = memory.map(0, bytes_for(size));
  return std::shared_ptr<ShmGroup>(
      new ShmGroup(std::move(memory), std::move(mapping), size, arena));
}

ShmGroup::ShmGroup(SharedMemory memory, Mapping mapping, int size, std::size_t arena)
    : memory_(std::move(memory)), mapping_(std::move(mapping)), size_(size), arena_bytes_(arena) {}

ShmGroup::~ShmGroup() {
  if (rank_ >= 0) leave(rank_);
}

ShmGroup::Header& ShmGroup::header() const { return *reinterpret_cast<Header*>(mapping_.data()); }

ShmGroup::RankState& ShmGroup::state(int rank) const {
  auto* states = reinterpret_cast<RankState*>(mapping_.data() + page_up(sizeof(Header)));
  return states[rank];
}

ShmGroup::Channel& ShmGroup::channel(int from, int to) const {
  auto n = static_cast<std::size_t>(size());
  auto* channels = reinterpret_cast<Channel*>(mapping_.data() + page_up(sizeof(Header)) +
                                              page_up(n * sizeof(RankState)));
  return channels[static_cast<std::size_t>(from) * n + static_cast<std::size_t>(to)];
}

std::byte* ShmGroup::slots(int from, int to) const {
  auto n = static_cast<std::size_t>(size());
  return mapping_.data() + page_up(sizeof(Header)) + page_up(n * sizeof(RankState)) +
         page_up(n * n * sizeof(Channel)) +
         (static_cast<std::size_t>(from) * n + static_cast<std::size_t>(to)) * kShmSlots *
             kShmSlotBytes;
}

// The pipes are the last in the memory.
std::shared_ptr<Pipes> ShmGroup::pipes(int rank) {
  std::byte* begin = mapping_.data() + bytes_for(size()) - page_up(RingPipes::bytes_for(size()));
  return std::make_shared<RingPipes>(begin, size(), rank, endpoint(rank).board());
}

bool ShmGroup::has_left(int rank) const {
  return state(rank).presence.load() >= Presence::left || has_ended(rank);
}

bool ShmGroup::has_ended(int rank) const {
  if (state(rank).presence.load() == Presence::ended) return true;
  const int there = state(rank).there.load() - 1;
  return followed_ && there >= 0 && there < followed_->size() && followed_->has_ended(there);
}

void ShmGroup::join(int rank) {
  if (rank < 0 || rank >= size()) {
    throw std::invalid_argument("rank " + std::to_string(rank) + " is not among the " +
                                std::to_string(size()) + " ranks of the group");
  }
  auto absent = Presence::absent;
  if (rank_ >= 0 || !state(rank).presence.compare_exchange_strong(absent, Presence::joined)) {
    throw std::invalid_argument("rank " + std::to_string(rank) +
                                " of the group is taken: every process needs a rank of its own");
  }
  rank_ = rank;
  if (followed_) state(rank).there.store(followed_->rank_ + 1);
  state(rank).queue.prepare();
  const CoreSet cores = affinity();
  for (std::size_t word = 0; word < cores.size(); ++word)
    header().cores[word].fetch_or(cores[word]);
  // Pages that are touched for the first time in a call would make it slow.
  std::size_t bytes = Board::bytes_for(size(), /*with_staging=*/true);
  if (bytes <= kPopulatedBytes) mapping_.populate(board(), bytes);
  map_arenas();
  endpoint_ = std::make_unique<ShmEndpoint>(*this, rank);
}

void ShmGroup::map_arenas() {
  std::int32_t place = rank_;
  if (followed_) {
    arena_ = followed_->arena_;
    place = followed_->arena_of(followed_->rank_);
  } else if (arena_bytes_ > 0) {
    try {
      arena_ = Arena::map(memory_.descriptor(), arenas_begin(bytes_for(size())), arena_bytes_,
                          size(), rank_);
    } catch (const std::system_error&) {
      // Without the address space for it, all of the group's arrays are ordinary.
    }
  }
  state(rank_).arena.store(arena_ ? place + 1 : -1);
}

int ShmGroup::arena_of(int rank) const { return state(rank).arena.load() - 1; }

bool ShmGroup::all_reach() const {
  if (int known = reaches_.load(std::memory_order_relaxed); known >= 0) return known != 0;
  bool all_joined = true, all_map = true;
  for (int r = 0; r < size(); ++r) {
    all_joined = all_joined && state(r).arena.load() != 0;
    all_map = all_map && arena_of(r) >= 0;
  }
  if (all_joined) reaches_.store(all_map, std::memory_order_relaxed);
  return all_joined && all_map;
}

std::uint64_t ShmGroup::place_of(const void* data, std::size_t bytes) const {
  return arena_ && all_reach() ? arena_->place_of(data, bytes) : 0;
}

std::byte* ShmGroup::reach(int rank, std::uint64_t place, std::size_t bytes) const {
  return arena_ ? arena_->reach(arena_of(rank), place, bytes) : nullptr;
}

void ShmGroup::leave(int rank) noexcept {
  if (!origin_.is_here()) return;  // a forked child does not speak for the rank
  const auto now = rank == rank_ ? Presence::left : Presence::ended;
  if (state(rank).presence.exchange(now) >= Presence::left) return;  // it may never have joined
  for (int r = 0; r < size(); ++r) state(r).queue.wake();
  for (int peer = 0; endpoint_ && rank == rank_ && peer < size(); ++peer) {
    if (peer == rank || !endpoint_->differs(peer) || has_failed()) continue;
    fail(FailureKind::mismatch, endpoint_->describe_mismatch_with(peer));
  }
}

// Launchers may give each rank cores of its own: those of all ranks count.
bool ShmGroup::in_crowd() const {
  if (int known = crowd_.load(std::memory_order_relaxed); known >= 0) return known != 0;
  bool all = true;
  for (int r = 0; r < size(); ++r) all = all && state(r).presence.load() != Presence::absent;
  CoreSet cores;
  for (std::size_t word = 0; word < cores.size(); ++word) cores[word] = header().cores[word].load();
  static const double quota = quota_of_cores();
  bool crowd = size() > within_quota(count_of(cores), quota);
  if (all) crowd_.store(crowd, std::memory_order_relaxed);
  return crowd;
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

void ShmGroup::fail(FailureKind kind, const std::string& message) noexcept {
  std::uint32_t whole = 0;
  if (!origin_.is_here() || !header().failed.compare_exchange_strong(whole, 1)) return;
  header().kind = static_cast<std::uint32_t>(kind);
  set_name(header().message, message);
  header().failed.store(2);
  for (int r = 0; r < size(); ++r) state(r).queue.wake();
}

std::optional<Failure> ShmGroup::failure() const {
  if (header().failed.load() == 0) {
    if (!followed_) return {};
    auto theirs = followed_->failure();
    if (!theirs || theirs->kind != FailureKind::peer_lost) return {};
    return as_told_by_parts(*theirs);
  }
  // Another rank writes the reason just now; it may also have been killed while it did.
  auto patience = Clock::now() + std::chrono::seconds(1);
  while (header().failed.load() != 2) {
    if (Clock::now() > patience) {
      return Failure(FailureKind::aborted, "a rank was lost while it said why the group failed");
    }
    std::this_thread::yield();
  }
  char text[sizeof(Header::message)];
  std::memcpy(text, header().message, sizeof text);
  text[sizeof text - 1] = 0;
  return Failure(static_cast<FailureKind>(header().kind), text);
}

void ShmGroup::check() const {
  if (header().failed.load(std::memory_order_relaxed) == 0) return;
  throw *failure();
}

CallRecord ShmGroup::call_of(int rank, std::uint64_t number) const {
  const RankState& from = state(rank);
  CallRecord call;
  for (int tries = 0;; ++tries) {
    std::uint64_t before = from.writing.load(), last = from.number.load();
    // A call that has not begun, or is long over: the last one says more.
    if (number > last || last + 1 - number >= kHistory) number = last;
    call = from.records[from.record_of[number % kHistory].load() % kRecords];
    call.fingerprint = from.fingerprint_of[number % kHistory].load();
    std::atomic_thread_fence(std::memory_order_acquire);
    // The rank may be about to say that it is in the call that takes this one's place.
    bool whole = before % 2 == 0 && from.writing.load() == before;
    if (whole && from.number.load() + 1 - number < kHistory) break;
    if (tries == 1000) break;  // a process that was stopped while it wrote: what there is must do
    std::this_thread::yield();
  }
  // Whatever the memory holds: names end.
  call.collective[sizeof call.collective - 1] = call.algorithm[sizeof call.algorithm - 1] = 0;
  call.op[sizeof call.op - 1] = call.dtype[sizeof call.dtype - 1] = 0;
  call.number = number;
  return call;
}

void ShmGroup::tell_message(int rank, const std::string& message) noexcept {
  if (origin_.is_here()) set_name(state(rank).message, message);
}

KnownCalls ShmGroup::calls_of(int rank) const {
  KnownCalls found;
  std::uint64_t last = calls(rank);
  for (std::uint64_t n = last; n > 0 && last - n < kHistory; --n) {
    CallRecord call = call_of(rank, n);
    if (call.number == n) found.emplace_back(call);
  }
  return found;
}

std::uint64_t ShmGroup::calls(int rank) const { return state(rank).number.load(); }

void ShmGroup::beat() {
  if (rank_ < 0 || !origin_.is_here()) return;
  std::lock_guard lock(heard_mutex_);
  state(rank_).beats.fetch_add(1);
  heard_.resize(static_cast<std::size_t>(size()), {0, Clock::now()});
  hear();
}

// With the mutex held: looks for beats since the last time.
void ShmGroup::hear() {
  auto now = Clock::now();
  for (std::size_t r = 0; r < heard_.size(); ++r) {
    int rank = static_cast<int>(r);
    std::uint64_t beats = state(rank).beats.load();
    if (beats != heard_[r].beats || has_left(rank)) heard_[r] = {beats, now};
  }
}

std::vector<int> ShmGroup::silent(double seconds) {
  std::vector<int> found;
  std::lock_guard lock(heard_mutex_);
  hear();
  auto now = Clock::now();
  for (std::size_t r = 0; r < heard_.size(); ++r) {
    int rank = static_cast<int>(r);
    if (rank == rank_ || std::chrono::duration<double>(now - heard_[r].at).count() <= seconds)
      continue;
    found.push_back(rank);
  }
  return found;
}

std::string ShmGroup::describe(int rank) const {
  const RankState& of = state(rank);
  if (of.presence.load() == Presence::absent) {
    return "rank " + std::to_string(name(rank)) + " has not joined yet";
  }
  char message[sizeof of.message];
  std::memcpy(message, of.message, sizeof message);
  message[sizeof message - 1] = 0;
  return describe_rank(name(rank), of.busy.load() != 0, call_of(rank, of.number.load()), message);
}

bool ShmGroup::has_failed() const { return header().failed.load() != 0; }

}  // namespace pycollective
