#include "transport/shm_endpoint.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "support/tuning.h"

namespace pycollective {

ShmEndpoint::ShmEndpoint(ShmGroup& group, int rank)
    : group_(group),
      memory_(group.memory()),
      rank_(rank),
      pending_(static_cast<std::size_t>(group.size())),
      zero_copy_until_(static_cast<std::size_t>(group.size())),
      board_(*this) {}

// Calls ------------------------------------------------------------------------------------------

void ShmEndpoint::enter(const CallRecord& call) {
  auto& me = state();
  if (me.busy.exchange(1)) {
    throw std::logic_error("rank " + std::to_string(rank_) +
                           " is already in a collective call in another thread; a rank makes one "
                           "call at a time");
  }
  const std::uint64_t number = call_.number + 1;
  const bool repeats = number > 1 && call.identity == call_.identity;
  if (!repeats) call_ = call;
  call_.number = number;
  fingerprint_ = call_.fingerprint = fingerprint_after(fingerprint_, call_.identity);
  board_.fingerprint = fingerprint_;
  me.history.add(call_, repeats);
}

void ShmEndpoint::leave() noexcept {
  if (group_.has_failed()) withdraw();
  if (unsent_ > 0) {  // after a failure
    for (Pending& pending : pending_) pending = {};
    unsent_ = 0;
  }
  has_zero_copy_ = false;
  board_.written = {};
  state().busy.store(0, std::memory_order_release);
}

// A peer writes at most one more block after the failure. If it does not finish within kWithdrawal,
// it was stopped or killed; then its later writes must not reach this rank's array.
void ShmEndpoint::withdraw() noexcept {
  if (!board_.written.bytes) return;
  std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with PeerAccess in direct.cc
  auto deadline = Clock::now() + kWithdrawal;
  while (board_.is_any_peer_accessing()) {
    if (Clock::now() > deadline) {
      group_.arena()->detach(board_.written.data, board_.written.bytes);
      break;
    }
    std::this_thread::yield();
  }
}

// Messages ---------------------------------------------------------------------------------------

bool ShmEndpoint::try_send(int peer, const void* data, std::size_t bytes) {
  Pending& pending = pending_[static_cast<std::size_t>(peer)];
  if (pending.active && !push(peer)) return false;
  std::uint64_t handle = bytes >= kZeroCopyBytes ? group_.handle_of(data, bytes) : 0;
  pending = {static_cast<const std::byte*>(data), bytes, handle, true};
  ++unsent_;
  push(peer);
  return true;
}

void ShmEndpoint::progress() {
  for (int peer = 0; unsent_ > 0 && peer < group_.size(); ++peer) {
    if (pending_[static_cast<std::size_t>(peer)].active) push(peer);
  }
}

bool ShmEndpoint::push(int peer) {
  Pending& pending = pending_[static_cast<std::size_t>(peer)];
  auto& channel = memory_.channel(rank_, peer);
  std::uint64_t posted = channel.posted.load(std::memory_order_relaxed);
  const std::uint64_t before = posted;
  // The limit ends the loop if the peer consumes parts as fast as this rank posts them.
  const std::uint64_t most =
      posted + std::max<std::uint64_t>(kPieceBytes / memory_.slot_bytes(), 1);
  while (pending.active && posted < most &&
         posted - channel.consumed.load(std::memory_order_acquire) < std::uint64_t{kShmSlots}) {
    auto& slot = channel.slots[posted % kShmSlots];
    std::size_t part =
        pending.handle ? pending.bytes : std::min(pending.bytes, memory_.slot_bytes());
    slot.fingerprint = fingerprint_;
    slot.call = call_.number;
    slot.remaining = pending.bytes;
    slot.bytes = part;
    std::byte* target = slot.inline_data;
    if (part > kShmInlineBytes) {
      slot.handle = pending.handle;
      target = memory_.ring(rank_, peer) + posted % kShmSlots * memory_.slot_bytes();
    }
    if (pending.handle) {
      zero_copy_until_[static_cast<std::size_t>(peer)] = posted + 1;
      has_zero_copy_ = true;
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

bool ShmEndpoint::has_read(int peer) const {
  return memory_.channel(rank_, peer).consumed.load(std::memory_order_acquire) >=
         zero_copy_until_[static_cast<std::size_t>(peer)];
}

bool ShmEndpoint::flushed() {
  if (unsent_ > 0) return false;
  for (int peer = 0; has_zero_copy_ && peer < group_.size(); ++peer) {
    if (!has_read(peer)) return false;
  }
  has_zero_copy_ = false;
  return true;
}

Piece ShmEndpoint::try_receive(int peer, std::size_t remaining) {
  auto& channel = memory_.channel(peer, rank_);
  std::uint64_t consumed = channel.consumed.load(std::memory_order_relaxed);
  if (channel.posted.load(std::memory_order_acquire) == consumed) return {};
  const auto& slot = channel.slots[consumed % kShmSlots];
  if (slot.fingerprint != fingerprint_ || slot.remaining != remaining || slot.bytes > remaining) {
    mismatch(peer);
  }
  if (slot.bytes <= kShmInlineBytes) return {slot.inline_data, slot.bytes};
  if (slot.handle) {
    const std::byte* data = group_.address_of(peer, slot.handle, slot.bytes);
    if (!data) cannot_read(peer);
    return {data, slot.bytes};
  }
  return {memory_.ring(peer, rank_) + consumed % kShmSlots * memory_.slot_bytes(), slot.bytes};
}

void ShmEndpoint::release(int peer) {
  auto& channel = memory_.channel(peer, rank_);
  std::uint64_t consumed = channel.consumed.load(std::memory_order_relaxed);
  const auto& slot = channel.slots[consumed % kShmSlots];
  if (slot.bytes > kShmInlineBytes && slot.handle) {
    // Throws if the sender gave up its call: it may have overwritten the data meanwhile.
    std::atomic_thread_fence(std::memory_order_acquire);
    group_.check();
  }
  channel.consumed.store(consumed + 1, std::memory_order_release);
  ++moved_;
  wake(peer);
}

// Peers ------------------------------------------------------------------------------------------

void ShmEndpoint::check_peers() {
  if (auto lost = group_.failure()) group_.fail(*lost);  // a failure of the followed group
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer == rank_) continue;
    const auto& other = memory_.rank(peer);
    if (differs(peer)) mismatch(peer);
    // busy: the process has ended in the middle of a call.
    bool has_left =
        group_.has_left(peer) && (group_.calls(peer) < call_.number || other.busy.load() != 0);
    if (has_left) {
      group_.fail(
          peer_left_failure(group_.titled(peer), group_.calls(peer), group_.titled(rank_), call_));
      group_.check();
    }
  }
}

bool ShmEndpoint::differs(int peer) const {
  const std::uint64_t last = std::min(call_.number, group_.calls(peer));
  if (last == 0) return false;
  const CallRecord mine = state().history.call(last),
                   theirs = memory_.rank(peer).history.call(last);
  return mine.number == theirs.number && mine.fingerprint != theirs.fingerprint;
}

Failure ShmEndpoint::mismatch_with(int peer) const {
  return mismatch_failure(group_.titled(rank_), known_calls(state().history), group_.titled(peer),
                          known_calls(memory_.rank(peer).history));
}

void ShmEndpoint::mismatch(int peer) {
  group_.fail(mismatch_with(peer));
  group_.check();
  throw std::logic_error("unreachable");
}

void ShmEndpoint::cannot_read(int peer) {
  const TitledRank it = group_.titled(peer);
  group_.fail({FailureKind::peer_lost,
               group_.title(rank_) + " cannot read the array of " + it.title + " for " +
                   call_.describe() + ": its process has ended, or the memory is not mapped there",
               {it.rank},
               {call_.describe()}});
  group_.check();
  throw std::logic_error("unreachable");
}

// The board --------------------------------------------------------------------------------------

namespace {

std::vector<WaitQueue*> queues_of(const ShmMemory& memory) {
  std::vector<WaitQueue*> queues;
  for (int r = 0; r < memory.size(); ++r) queues.push_back(&memory.rank(r).queue);
  return queues;
}

}  // namespace

ShmBoard::ShmBoard(ShmEndpoint& endpoint)
    : Board(endpoint.memory_.board(), endpoint.rank_, queues_of(endpoint.memory_),
            /*with_staging=*/true),
      endpoint_(endpoint) {}

std::uint64_t ShmBoard::handle_of(const void* data, std::size_t bytes) const {
  return endpoint_.group_.handle_of(data, bytes);
}

std::byte* ShmBoard::address_of(int peer, std::uint64_t handle, std::size_t bytes) {
  return endpoint_.group_.address_of(peer, handle, bytes);
}

CopyWay ShmBoard::begin_long_call(Collective collective, std::size_t bytes, CopyWay last) {
  if (bytes >= kCopyTrialBytes) began = Clock::now();
  return endpoint_.group_.begin_long_call(collective, bytes, last);
}

void ShmBoard::end_long_call() { endpoint_.group_.end_long_call(began); }

std::uint64_t ShmBoard::remote_address(const void* data) {
  return endpoint_.group_.remote_address(data);
}

CopyWay ShmBoard::begin_long_message(int to, std::size_t bytes) {
  return endpoint_.group_.begin_long_message(to, bytes);
}

void ShmBoard::end_long_message(std::size_t bytes, CopyWay way, Clock::time_point began) {
  endpoint_.group_.end_long_message(bytes, way, began);
}

bool ShmBoard::read_remote(int peer, std::uint64_t address, std::byte* to, std::size_t bytes) {
  return endpoint_.group_.read_remote(peer, address, to, bytes);
}

bool ShmBoard::is_oversubscribed() const { return endpoint_.group_.is_oversubscribed(); }

void ShmBoard::mismatch(int peer) { endpoint_.mismatch(peer); }

void ShmBoard::cannot_read(int peer) { endpoint_.cannot_read(peer); }

}  // namespace pycollective
