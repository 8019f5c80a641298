#include "executor/direct.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "support/copy.h"
#include "support/round_up.h"
#include "support/tuning.h"

namespace pycollective {
namespace {

// Returns the next position at which `bytes` bytes do not wrap around the ring's end.
std::uint64_t position_in_ring(std::uint64_t position, std::size_t bytes, std::size_t ring) {
  return position % ring + bytes > ring ? round_up(position, ring) : position;
}

std::uint8_t shift_of(const void* address) {
  return static_cast<std::uint8_t>(reinterpret_cast<std::uintptr_t>(address) % kCacheLine);
}

// A claim of a chunk. Positions are multiples of a cache line, and claims of later blocks are
// larger.
constexpr int kRankBits = 16;
std::uint64_t claim_of(std::uint64_t position, int rank) {
  return position / kCacheLine << kRankBits | static_cast<std::uint64_t>(rank);
}
// In a broadcast, the shares of a reader and of the root begin at multiples of this.
constexpr std::size_t kShareUnit = 16;

int claimant_of(std::uint64_t claim) { return static_cast<int>(claim & ((1U << kRankBits) - 1)); }

// Announces that this rank reads or writes memory of its peers. A peer that gives up a call first
// fails the group, then waits until no rank announces this; no rank begins after the failure.
class PeerAccess {
 public:
  PeerAccess(Board& board, Endpoint& endpoint, bool accesses)
      : flag_(board.counters(board.rank()).accesses_peers),
        endpoint_(endpoint),
        accesses_(accesses) {
    if (!accesses_) return;
    flag_.store(1);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    try {
      endpoint_.check();
    } catch (...) {
      flag_.store(0, std::memory_order_release);
      throw;
    }
  }
  ~PeerAccess() {
    if (accesses_) flag_.store(0, std::memory_order_release);
  }
  PeerAccess(const PeerAccess&) = delete;
  PeerAccess& operator=(const PeerAccess&) = delete;
  // Throws if a peer gave up its call: the data that was read may have changed meanwhile.
  void check() const {
    if (!accesses_) return;
    std::atomic_thread_fence(std::memory_order_acquire);
    endpoint_.check();
  }

 private:
  std::atomic<std::uint32_t>& flag_;
  Endpoint& endpoint_;
  bool accesses_;
};

}  // namespace

// Roles ------------------------------------------------------------------------------------------

struct DirectExecution::Roles {
  enum RankSet : std::uint8_t { none, root, others, all };
  enum Length : std::uint8_t { one, each };  // the array or one part; one part for each rank
  RankSet sources, consumers, publishers, readers;
  RankSet with_input;
  Length input;
  RankSet with_output;
  Length output;
};

// A reduce of many ranks or of mapped arrays: rank r combines chunk r of all of them.
const DirectExecution::Roles DirectExecution::kDistributedReduce = {
    Roles::all, Roles::all, Roles::all,  Roles::root,
    Roles::all, Roles::one, Roles::root, Roles::one};

const DirectExecution::Roles& DirectExecution::roles_of(Collective collective) {
  using enum Roles::RankSet;
  using enum Roles::Length;
  static constexpr Roles kRoles[] = {
      // in the order of Collective
      {all, all, all, all, all, one, all, one},          // all_reduce
      {others, root, none, none, all, one, root, one},   // reduce
      {all, all, none, none, all, each, all, one},       // reduce_scatter
      {none, none, root, others, root, one, all, one},   // broadcast
      {root, others, none, none, root, each, all, one},  // scatter
      {none, none, others, root, all, one, root, each},  // gather
      {none, none, all, all, all, one, all, each},       // all_gather
      {all, all, none, none, all, each, all, each},      // all_to_all
      {none, none, none, none, none, one, none, one}     // barrier
  };
  static_assert(std::size(kRoles) == kDirectCollectives);
  return kRoles[static_cast<std::size_t>(collective)];
}

bool DirectExecution::contains_rank(std::uint8_t ranks, int rank) const {
  if (ranks == Roles::root) return rank == call_.root;
  return ranks == Roles::all || (ranks == Roles::others && rank != call_.root);
}

bool DirectExecution::is_source(int rank) const { return contains_rank(roles_->sources, rank); }
bool DirectExecution::is_consumer(int rank) const { return contains_rank(roles_->consumers, rank); }
bool DirectExecution::is_publisher(int rank) const {
  return contains_rank(roles_->publishers, rank);
}

bool DirectExecution::is_reader(int rank) const {
  if (is_cut_ && board_.peers[static_cast<std::size_t>(rank)].output) {
    return false;  // the peers write to its output
  }
  return contains_rank(roles_->readers, rank);
}

bool DirectExecution::is_staging(int rank) const {
  const auto& peer = board_.peers[static_cast<std::size_t>(rank)];
  return is_source(rank) && !peer.input && !peer.remote_input;
}

bool DirectExecution::is_awaited(int rank) const {
  if (may_distribute_ || (!has_exchange() && !has_publishing())) return true;  // also in a barrier
  const bool consumes = contains_rank(roles_->consumers, board_.rank());
  const bool copies_out = contains_rank(roles_->readers, board_.rank());
  return (consumes && is_source(rank)) || (copies_out && is_publisher(rank)) ||
         (may_write_ && contains_rank(roles_->readers, rank));
}

bool DirectExecution::has_exchange() const { return roles_->sources != Roles::none; }
bool DirectExecution::has_publishing() const { return roles_->publishers != Roles::none; }

// Blocks and spans -------------------------------------------------------------------------------

std::size_t DirectExecution::input_bytes(int rank) const {
  return contains_rank(roles_->with_input, rank) ? bytes_of(roles_->input) : 0;
}

std::size_t DirectExecution::output_bytes(int rank) const {
  return contains_rank(roles_->with_output, rank) ? bytes_of(roles_->output) : 0;
}

std::size_t DirectExecution::bytes_of(std::uint8_t length) const {
  return unit_ * (length == Roles::each ? static_cast<std::size_t>(board_.size()) : 1);
}

DirectExecution::Span DirectExecution::single(const Block& block) const {
  return {block.begin, block.bytes};
}

DirectExecution::Span DirectExecution::chunk_of(const Block& block, int rank) const {
  auto r = static_cast<std::size_t>(rank);
  if (!is_cut_) return {r * unit_ + block.begin, block.bytes};
  std::size_t begin = std::min(r * block.chunk, block.bytes);
  std::size_t end = std::min(begin + block.chunk, block.bytes);
  return {block.begin + begin, end - begin};
}

DirectExecution::Span DirectExecution::input_span(const Block& block, int rank) const {
  return has_exchange() && !is_central() ? chunk_of(block, rank) : single(block);
}

DirectExecution::Span DirectExecution::output_span(const Block& block, int rank) const {
  switch (call_.collective) {
    case Collective::all_reduce:
    case Collective::all_gather:
    case Collective::gather:
    case Collective::all_to_all:
      return chunk_of(block, rank);
    default:
      return is_cut_ ? chunk_of(block, rank) : single(block);
  }
}

void DirectExecution::lay_out(Block& block) const {
  auto size = static_cast<std::size_t>(board_.size());
  std::size_t left = unit_ - block.begin;
  std::size_t most = kMappedChunkBytes;
  if (board_.has_staging()) {
    // Four blocks fit into an input ring. An output ring holds the blocks that a rank publishes
    // ahead, and one more. The end of the ring may be too short for a block.
    std::size_t stride = kStagedChunkBytes + kCacheLine;
    if (has_exchange()) {
      stride = std::min(stride, board_.input_bytes() / 4 / (is_central() ? 1 : size));
    }
    if (has_publishing()) {
      stride = std::min(stride, board_.output_bytes() / (kOversubscribedLookahead + 2));
    }
    most = stride / kCacheLine * kCacheLine - kCacheLine;
  }
  if (is_cut_) {
    block.chunk = std::min(most, round_up((left + size - 1) / size, kCacheLine));
    block.bytes = std::min(left, size * block.chunk);
  } else {
    block.chunk = block.bytes = std::min(most, left);
  }
  block.stride = round_up(block.chunk, kCacheLine) + kCacheLine;  // plus the shift
  if (!board_.has_staging()) {  // positions only number the blocks
    block.input_at = block.input_end;
    block.output_at = block.output_end;
    block.input_end += kCacheLine;
    block.output_end += kCacheLine;
    return;
  }
  if (has_exchange()) {
    // A rank stages its own chunk only if its peers may combine the chunk.
    const std::size_t chunks = is_central() ? 1 : is_cut_ ? size : size - 1;
    const std::size_t bytes = chunks * block.stride;
    block.input_at = position_in_ring(block.input_end, bytes, board_.input_bytes());
    block.input_end = block.input_at + bytes;
  }
  if (has_publishing()) {
    block.output_at = position_in_ring(block.output_end, block.stride, board_.output_bytes());
    block.output_end = block.output_at + block.stride;
  }
}

void DirectExecution::move_to_next(Block& block) const {
  block.begin += block.bytes;
  block.bytes = 0;
  if (block.begin < unit_) lay_out(block);
}

std::byte* DirectExecution::staged(int from, int to, const Block& block) const {
  const int place = is_central() ? 0 : is_cut_ || to < from ? to : to - 1;
  return board_.input_staging(from) + block.input_at % board_.input_bytes() +
         static_cast<std::size_t>(place) * block.stride +
         board_.slot(from, sequence_).operands.input_shift;
}

std::byte* DirectExecution::published(int rank, const Block& block) const {
  return board_.output_staging(rank) + block.output_at % board_.output_bytes() +
         board_.slot(rank, sequence_).operands.output_shift;
}

const std::byte* DirectExecution::one_shot_data(int rank) const {
  if (is_in_slot()) return board_.slot(rank, sequence_).data;
  return board_.input_staging(rank) + one_shot_at_ % board_.input_bytes();
}

// A call --------------------------------------------------------------------------------------

DirectExecution::DirectExecution(Endpoint& endpoint, const DirectCall& call)
    : endpoint_(endpoint),
      board_(*endpoint.board()),
      call_(call),
      roles_(&roles_of(call.collective)),
      unit_(call.count * call.item),
      sequence_(board_.sequence + 1),
      fingerprint_(board_.fingerprint) {
  post();
}

bool DirectExecution::is_one_shot() const {
  return one_shot_bytes_ <= kOneShotBytes &&
         one_shot_bytes_ * static_cast<std::size_t>(board_.size()) <= kOneShotTotalBytes;
}

// Returns true if the slots of a one-shot call have the arrays themselves.
bool DirectExecution::is_in_slot() const {
  return one_shot_bytes_ <= sizeof(Board::Slot::data) && call_.parts == Parts::equal;
}

// Sets the place of this rank's one-shot data in its input staging ring. Returns the place's end.
std::uint64_t DirectExecution::place_one_shot() {
  one_shot_at_ = position_in_ring(board_.input_position, one_shot_bytes_, board_.input_bytes());
  return round_up(one_shot_at_ + one_shot_bytes_, kCacheLine);
}

// Returns false while a peer may still read the old data of the slot or the ring.
bool DirectExecution::post() {
  const int rank = board_.rank();
  if (!input_bytes(rank)) call_.input = nullptr;
  if (!output_bytes(rank)) call_.output = nullptr;
  if (board_.size() == 1) {
    mode_ = Mode::single;
    return true;
  }
  if (!board_.is_slot_free(sequence_)) return false;
  one_shot_bytes_ =
      std::max(input_bytes(call_.root), input_bytes((call_.root + 1) % board_.size()));
  auto& slot = board_.slot(rank, sequence_);
  if (call_.parts == Parts::different) {
    mode_ = Mode::offers_nothing;
    parts_differ_ = true;
    slot.operands = {};
  } else if (is_one_shot()) {
    const std::size_t ring = board_.input_bytes();
    if (!is_in_slot()) {
      const std::uint64_t end = place_one_shot();
      if (end > ring && !reached(&Board::Counters::consumed, end - ring, &DirectExecution::is_peer,
                                 board_.seen_consumed)) {
        return false;
      }
      board_.input_position = end;
    }
    mode_ = Mode::one_shot;
    std::byte* data = const_cast<std::byte*>(one_shot_data(rank));
    if (is_in_slot()) {
      if (std::size_t bytes = input_bytes(rank)) std::memcpy(data, call_.input, bytes);
    } else {
      way_ = board_.begin_long_call(call_.collective, unit_, CopyWay::past_cache);
      slot.operands.began = short_time(board_.began);
      if (std::size_t bytes = input_bytes(rank)) write_for_peers(data, call_.input, bytes);
    }
  } else {
    mode_ = Mode::blocks;
    std::size_t moved = 0;
    for (int r = 0; r < board_.size(); ++r) moved += input_bytes(r) + output_bytes(r);
    call_.past_cache = board_.stores.begin(call_.collective, moved);
    input_begin_ = board_.input_position;
    output_begin_ = board_.output_position;
    const std::size_t in = input_bytes(rank), out = output_bytes(rank);
    const bool reduces = call_.collective == Collective::reduce;
    if (reduces && board_.size() > kCentralReduceRanks) roles_ = &kDistributedReduce;
    is_cut_ = has_exchange() && has_publishing();
    const bool copies =
        (call_.collective == Collective::gather || call_.collective == Collective::broadcast) &&
        std::max(input_bytes(call_.root), output_bytes(call_.root)) >= kSharedCopyBytes;
    const bool writable = is_cut_ || reduces || copies;  // by the peers
    auto& operands = slot.operands;
    operands = {in ? board_.handle_of(call_.input, in) : 0,
                out && writable ? board_.handle_of(call_.output, out) : 0,
                0,
                0,
                0,
                shift_of(call_.input),
                shift_of(call_.output),
                0,
                0};
    const bool input_is_mapped = operands.input != 0;
    output_is_mapped_ = operands.output != 0;
    may_write_ = copies && is_publisher(rank) && input_is_mapped;
    const bool is_mapped =
        in != 0 && input_is_mapped && (out == 0 || !is_cut_ || output_is_mapped_);
    way_ = board_.begin_long_call(call_.collective, unit_,
                                  is_mapped ? CopyWay::plain : CopyWay::remote_read);
    if (way_ == CopyWay::remote_read) {
      if (!input_is_mapped) operands.remote_input = board_.remote_address(call_.input);
      if (is_cut_ && !output_is_mapped_)
        operands.remote_output = board_.remote_address(call_.output);
    }
    input_is_read_ = input_is_mapped || operands.remote_input != 0;
    output_is_read_ = output_is_mapped_ || operands.remote_output != 0;
    if (output_is_mapped_) board_.written = {call_.output, out};
    for (auto& peer : board_.peers) peer = {};
    auto& own = board_.peers[static_cast<std::size_t>(rank)];
    own.input = input_is_mapped ? const_cast<std::byte*>(call_.input) : nullptr;
    own.output = output_is_mapped_ ? call_.output : nullptr;
    lookahead_ = board_.lookahead();
    may_distribute_ =
        reduces && !is_cut_ && input_is_mapped && (rank != call_.root || output_is_mapped_);
    if (!may_distribute_) begin_blocks();
    shares_ = call_.collective == Collective::all_reduce && board_.is_oversubscribed() &&
              !input_is_read_ && !output_is_read_ && block_bytes_ == unit_;
    operands.shares = shares_ ? 1 : 0;
    operands.began = short_time(board_.began);
    all_share_ = shares_;
  }
  if (call_.parts != Parts::equal) {
    equal_part_ = parts_differ_ ? 0 : unit_;
    slot.operands.part = parts_differ_ ? Board::kDifferentParts : unit_;
  }
  board_.sequence = sequence_;
  board_.posted_fingerprint = fingerprint_;
  slot.fingerprint = fingerprint_;
  slot.sequence.store(sequence_, std::memory_order_release);
  // Drains the store buffer, because loads of the peers' slots would delay this rank's stores.
  if (mode_ == Mode::one_shot && !is_in_slot()) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  board_.wake_others();
  return true;
}

// Sets the end of the call's blocks, and returns the first one.
DirectExecution::Block DirectExecution::lay_out_all() {
  last_.input_end = board_.input_position;
  last_.output_end = board_.output_position;
  lay_out(last_);
  const Block first = last_;
  while (last_.bytes) move_to_next(last_);
  return first;
}

void DirectExecution::begin_blocks() {
  const Block first = lay_out_all();
  block_bytes_ = first.bytes;
  const int rank = board_.rank();
  // A scatter's root copies its own part in try_stage(), also if its input is mapped.
  const bool stages = !input_is_read_ || !is_consumer(rank);
  if (is_source(rank) && stages) staging_ = first;
  if (is_consumer(rank) || is_publisher(rank)) producing_ = first;
  if (is_reader(rank)) copying_out_ = first;
}

// Returns true if all inputs and the root's output are mapped.
bool DirectExecution::have_all_mapped() const {
  bool inputs = std::all_of(board_.peers.begin(), board_.peers.end(),
                            [](const Board::Peer& peer) { return peer.input != nullptr; });
  return inputs && board_.peers[static_cast<std::size_t>(call_.root)].output;
}

// Returns true if all awaited ranks have posted. Reads the operands from their slots.
bool DirectExecution::have_posted() {
  if (checked_ == board_.size()) return true;
  for (; checked_ < board_.size(); ++checked_) {
    if (checked_ == board_.rank()) continue;
    if (!is_awaited(checked_)) {
      awaits_all_ = false;
      continue;
    }
    const auto& slot = board_.slot(checked_, sequence_);
    if (slot.sequence.load(std::memory_order_acquire) != sequence_) return false;
    if (slot.fingerprint != fingerprint_) board_.mismatch(checked_);
    if (call_.parts != Parts::equal) {
      const std::uint64_t part = slot.operands.part;
      if (part != Board::kDifferentParts) equal_part_ = std::max(equal_part_, part);
      parts_differ_ = parts_differ_ || part != unit_;
    }
    if (mode_ == Mode::offers_nothing || parts_differ_ || is_in_slot()) continue;
    const Board::Operands operands = slot.operands;
    board_.began = std::max(board_.began, time_near(board_.began, operands.began));
    if (mode_ == Mode::one_shot) continue;
    auto& peer = board_.peers[static_cast<std::size_t>(checked_)];
    if (operands.input) peer.input = address_of(checked_, operands.input, input_bytes(checked_));
    all_share_ = all_share_ && operands.shares != 0;
    peer.remote_input = operands.remote_input;
    peer.remote_output = operands.remote_output;
    if (operands.output)
      peer.output = address_of(checked_, operands.output, output_bytes(checked_));
  }
  if (awaits_all_) board_.all_posted = sequence_;
  return true;
}

std::byte* DirectExecution::address_of(int peer, std::uint64_t handle, std::size_t bytes) const {
  std::byte* found = board_.address_of(peer, handle, bytes);
  if (!found) board_.cannot_read(peer);
  return found;
}

void DirectExecution::read_remote(int peer, std::uint64_t address, std::byte* to,
                                  std::size_t bytes) const {
  if (!board_.read_remote(peer, address, to, bytes)) board_.cannot_read(peer);
}

Progress DirectExecution::advance() {
  switch (mode_) {
    case Mode::single:
      complete_single();
      return Progress::done;
    case Mode::not_posted:
      return post() ? Progress::moved : Progress::blocked;
    case Mode::one_shot:
    case Mode::offers_nothing:
      if (!have_posted()) return Progress::blocked;
      if (parts_differ_) {
        pass_over();
      } else {
        complete_one_shot();
      }
      return Progress::done;
    case Mode::blocks:
      return advance_blocks();
  }
  return Progress::blocked;
}

void DirectExecution::complete_single() {
  if (reduces(call_.collective)) {
    void* target = call_.output;
    const void* source = call_.input;
    combine_all(call_, &target, 1, &source, 1, call_.count);
  } else if (unit_ && call_.output != call_.input) {
    std::memcpy(call_.output, call_.input, unit_);
  }
}

void DirectExecution::complete_one_shot() {
  const int rank = board_.rank(), size = board_.size();
  const std::size_t own = static_cast<std::size_t>(rank) * unit_;
  // This rank's own data comes from its input, not from the board. After a peer's read, the board's
  // cache line may be in the peer's cache, and loading it again costs a transfer between the cores.
  auto data_of = [&](int r) { return r == rank ? call_.input : one_shot_data(r); };
  auto copy = [this](std::size_t at, const std::byte* from) {
    std::byte* to = call_.output + at;
    if (unit_ && to != from) std::memcpy(to, from, unit_);
  };
  switch (call_.collective) {
    case Collective::all_reduce:
    case Collective::reduce:
    case Collective::reduce_scatter: {
      if (!output_bytes(rank)) break;
      std::size_t place = call_.collective == Collective::reduce_scatter ? own : 0;
      for (int i = 0; i < size; ++i) {
        board_.sources[static_cast<std::size_t>(i)] = data_of(contributor(i)) + place;
      }
      void* target = call_.output;
      combine_all(call_, &target, 1, board_.sources.data(), size, call_.count);
      break;
    }
    case Collective::broadcast:
      copy(0, data_of(call_.root));
      break;
    case Collective::scatter:
      copy(0, data_of(call_.root) + own);
      break;
    case Collective::gather:
    case Collective::all_gather:
      if (!output_bytes(rank)) break;
      for (int r = 0; r < size; ++r) copy(static_cast<std::size_t>(r) * unit_, data_of(r));
      break;
    case Collective::all_to_all:
      for (int r = 0; r < size; ++r) copy(static_cast<std::size_t>(r) * unit_, data_of(r) + own);
      break;
    default:  // a barrier moves nothing
      break;
  }
  if (is_in_slot()) return;
  board_.end_long_call();
  // Lets the peers overwrite their one-shot data up to here.
  board_.counters(rank).consumed.store(board_.input_position, std::memory_order_release);
  // Between processes, a peer waits for a slot before it waits for this, and a post wakes it.
  if (!board_.has_staging()) board_.wake_others();
}

Progress DirectExecution::advance_blocks() {
  Progress progress = Progress::blocked;
  if (may_distribute_) {
    if (!have_posted()) return progress;
    may_distribute_ = false;
    if ((is_cut_ = have_all_mapped())) roles_ = &kDistributedReduce;
    begin_blocks();
    return Progress::moved;
  }
  for (std::size_t moved = 0; moved < kPieceBytes; moved += block_bytes_) {
    bool any = try_stage();
    any = try_produce() || any;
    any = try_copy_out() || any;
    if (any) {
      progress = Progress::moved;
      continue;
    }
    if (parts_differ_ && checked_ == board_.size()) {
      pass_over();
      return Progress::done;
    }
    if (staging_.bytes || producing_.bytes || copying_out_.bytes || !is_released()) return progress;
    end_blocks();
    board_.end_long_call();
    board_.stores.end();
    return Progress::done;
  }
  return progress;
}

// Moves past the call's blocks in the staging rings.
void DirectExecution::end_blocks() {
  auto& counters = board_.counters(board_.rank());
  board_.input_position = last_.input_end;
  board_.output_position = last_.output_end;
  counters.staged.store(last_.input_end, std::memory_order_release);
  counters.consumed.store(last_.input_end, std::memory_order_release);
  counters.published.store(last_.output_end, std::memory_order_release);
  counters.copied_out.store(last_.output_end, std::memory_order_release);
  board_.wake_others();
}

// Ends a call whose parts differ. The ranks with equal parts have reserved places in the staging
// rings, and nobody reads these. Positions must be the same on all ranks, so all move past them.
void DirectExecution::pass_over() {
  if (mode_ == Mode::blocks) {
    end_blocks();
    return;
  }
  if (mode_ == Mode::offers_nothing) {
    unit_ = equal_part_;
    one_shot_bytes_ = input_bytes(board_.rank());
    if (!is_one_shot()) {
      lay_out_all();
      end_blocks();
      return;
    }
    board_.input_position = place_one_shot();
  }
  board_.counters(board_.rank()).consumed.store(board_.input_position, std::memory_order_release);
  board_.wake_others();
}

bool DirectExecution::try_stage() {
  const int rank = board_.rank();
  if (!staging_.bytes || (is_consumer(rank) && staged_ahead_ > lookahead_)) return false;
  if (parts_differ_) return false;
  if (!input_is_read_ && staging_.input_end > board_.input_bytes() &&
      !reached(&Board::Counters::consumed, staging_.input_end - board_.input_bytes(),
               &DirectExecution::is_consumer, seen_consumed_)) {
    return false;
  }
  for (int i = shares_ ? 0 : 1; i < board_.size() && !input_is_read_; ++i) {
    int peer = (rank + i) % board_.size();
    if (!is_consumer(peer)) continue;
    Span chunk = input_span(staging_, peer);
    if (!chunk.bytes) continue;
    write_for_peers(staged(rank, peer, staging_), call_.input + chunk.offset, chunk.bytes);
  }
  if (!is_consumer(rank)) copy_own(staging_);
  board_.counters(rank).staged.store(staging_.input_end, std::memory_order_release);
  board_.wake_others();
  ++staged_ahead_;
  move_to_next(staging_);
  return true;
}

bool DirectExecution::try_produce() {
  if (!producing_.bytes) return false;
  const int rank = board_.rank();
  const bool consumes = is_consumer(rank), publishes = is_publisher(rank);
  if (consumes) {
    const bool stages = is_source(rank) && !input_is_read_;
    if ((stages && staged_ahead_ == 0) || !have_posted() || parts_differ_ ||
        !reached(&Board::Counters::staged, producing_.input_end, &DirectExecution::is_staging,
                 seen_staged_)) {
      return false;
    }
  }
  if (publishes) {
    if (may_write_ && !have_posted()) return false;
    if (!consumes && copying_out_.bytes && published_ahead_ > lookahead_) return false;
    const bool stages = is_cut_ ? !output_is_read_ : !input_is_read_;
    if (stages && board_.has_staging() && producing_.output_end > board_.output_bytes() &&
        !reached(&Board::Counters::copied_out, producing_.output_end - board_.output_bytes(),
                 &DirectExecution::is_reader, seen_copied_out_)) {
      return false;
    }
  }
  if (all_share_) return try_claim();
  if (consumes) {
    // A rank that stages its own input does not join blocks: staged_ahead_ counts single blocks.
    const bool stages = is_source(rank) && !input_is_read_;
    const bool joins =
        !stages && !reduces(call_.collective) && reads_remotely(&DirectExecution::is_source);
    consume(joins ? join_blocks(producing_) : producing_);
  } else {
    publish(writes_part() ? join_blocks(producing_) : producing_);
  }
  auto& counters = board_.counters(rank);
  if (consumes) counters.consumed.store(producing_.input_end, std::memory_order_release);
  if (publishes) counters.published.store(producing_.output_end, std::memory_order_release);
  board_.wake_others();
  --staged_ahead_;
  ++published_ahead_;
  move_to_next(producing_);
  return true;
}

// Claims a chunk, or combines the claimed one. If no chunk is left, the block is produced.
bool DirectExecution::try_claim() {
  if (claimed_ >= 0) {
    combine_claimed();
    return true;
  }
  const int rank = board_.rank(), size = board_.size();
  for (int i = 0; i < size; ++i) {
    const int owner = (rank + i) % size;
    auto& last = board_.counters(owner).claim;
    std::uint64_t seen = last.load(std::memory_order_relaxed);
    if (seen >= claim_of(producing_.input_end, 0)) continue;
    const auto claim = claim_of(producing_.input_end, rank);
    if (!last.compare_exchange_strong(seen, claim, std::memory_order_acq_rel)) continue;
    claimed_ = owner;
    return true;
  }
  --staged_ahead_;
  ++published_ahead_;
  move_to_next(producing_);
  return true;
}

void DirectExecution::combine_claimed() {
  const int rank = board_.rank(), size = board_.size();
  const Span chunk = input_span(producing_, claimed_);
  for (int r = 0; r < size; ++r) {
    board_.sources[static_cast<std::size_t>(r)] =
        r == rank ? call_.input + chunk.offset : staged(r, claimed_, producing_);
  }
  void* target = published(claimed_, producing_);
  combine_all(call_, &target, 1, board_.sources.data(), size, chunk.bytes / call_.item,
              way_ == CopyWay::past_cache ? 1 : 0);
  board_.counters(claimed_).published.store(producing_.output_end, std::memory_order_release);
  board_.wake_others();
  claimed_ = -1;
}

// Returns true if this rank reads the inputs of all peers with the role through the system.
bool DirectExecution::reads_remotely(Role role) const {
  for (int r = 0; r < board_.size(); ++r) {
    if (r == board_.rank() || !(this->*role)(r)) continue;
    if (!board_.peers[static_cast<std::size_t>(r)].remote_input) return false;
  }
  return true;
}

// Joins a block and the blocks after it, up to about kPieceBytes, for one system call. Moves
// `block` to the last of them.
DirectExecution::Block DirectExecution::join_blocks(Block& block) const {
  Block joined = block, next = block;
  for (move_to_next(next); next.bytes && joined.bytes < kPieceBytes; move_to_next(next)) {
    joined.bytes += next.bytes;
    block = next;
  }
  return joined;
}

// Returns the rank whose contribution is combined as the i-th one, as in the schedules "direct".
int DirectExecution::contributor(int i) const {
  const int rank = board_.rank();
  if (call_.collective == Collective::reduce) return (call_.root + i) % board_.size();
  if (call_.collective == Collective::reduce_scatter) return i == 0 ? rank : i <= rank ? i - 1 : i;
  return i;
}

void DirectExecution::consume(const Block& block) {
  const int rank = board_.rank(), size = board_.size();
  const Span own = input_span(block, rank);
  bool in_place = false;
  for (const auto& peer : board_.peers) {
    in_place = in_place || peer.input || peer.output || peer.remote_input;
  }
  PeerAccess access(board_, endpoint_, in_place);
  auto source = [&](int r) -> const std::byte* {
    if (r == rank) return call_.input + own.offset;
    const auto& peer = board_.peers[static_cast<std::size_t>(r)];
    if (peer.input) return peer.input + own.offset;
    if (!peer.remote_input) return staged(r, rank, block);
    std::byte* copy = board_.copy_of(r, block.stride) + shift_of(call_.input + own.offset);
    read_remote(r, peer.remote_input + own.offset, copy, own.bytes);
    return copy;
  };
  if (!reduces(call_.collective)) {
    for (int i = 0; i < size; ++i) {
      int r = (rank + i) % size;
      if (r == rank) {
        copy_own(block);
      } else if (std::byte* to = call_.output + output_span(block, r).offset; is_source(r)) {
        if (std::uint64_t remote = board_.peers[static_cast<std::size_t>(r)].remote_input) {
          read_remote(r, remote + own.offset, to, own.bytes);
        } else {
          write(to, source(r), own.bytes);
        }
      }
    }
    access.check();
    return;
  }
  for (int i = 0; i < size; ++i)
    board_.sources[static_cast<std::size_t>(i)] = source(contributor(i));
  std::size_t targets = 0;
  const Span result = output_span(block, rank);
  if (call_.output) board_.targets[targets++] = call_.output + result.offset;
  bool publishes = false;
  for (int r = 0; is_cut_ && r < size; ++r) {
    if (r == rank || !output_bytes(r)) continue;
    std::byte* mapped = board_.peers[static_cast<std::size_t>(r)].output;
    if (mapped) {
      board_.targets[targets++] = mapped + result.offset;
    } else {
      publishes = true;
    }
  }
  std::size_t past_cache = 0;
  if (publishes && !output_is_read_) {
    board_.targets[targets++] = published(rank, block);
    past_cache = way_ == CopyWay::past_cache ? 1 : 0;
  }
  combine_all(call_, board_.targets.data(), targets, board_.sources.data(), size,
              own.bytes / call_.item, past_cache);
  access.check();
}

void DirectExecution::publish(const Block& block) {
  const Span own = input_span(block, board_.rank());
  if (may_write_) {
    PeerAccess access(board_, endpoint_, true);
    const std::size_t theirs = readers_share(own.bytes);
    const std::byte* from = call_.input + own.offset + theirs;
    for (int r = 0; r < board_.size(); ++r) {
      std::byte* to = board_.peers[static_cast<std::size_t>(r)].output;
      if (r == board_.rank() || !to) continue;
      to += output_span(block, board_.rank()).offset + theirs;
      if (to != from) write(to, from, own.bytes - theirs);
    }
    access.check();
  }
  if (!input_is_read_) {
    write_for_peers(published(board_.rank(), block), call_.input + own.offset, own.bytes);
  }
  copy_own(block);
}

std::size_t DirectExecution::readers_share(std::size_t bytes) const {
  if (call_.collective != Collective::broadcast) return 0;
  const auto size = static_cast<std::size_t>(board_.size());
  return bytes * (size - 1) / size / kShareUnit * kShareUnit;
}

// Copies this rank's part from its own input to its output.
void DirectExecution::copy_own(const Block& block) {
  const int rank = board_.rank();
  if (!call_.input || !call_.output || reduces(call_.collective)) return;
  const std::byte* from = call_.input + input_span(block, rank).offset;
  const Span to = output_span(block, rank);
  if (call_.output + to.offset != from) write(call_.output + to.offset, from, to.bytes);
}

void DirectExecution::write(std::byte* to, const std::byte* from, std::size_t bytes) const {
  if (call_.past_cache) {
    copy_past_cache(to, from, bytes);
  } else {
    copy_bytes(to, from, bytes);
  }
}

// Writes to this rank's staging rings.
void DirectExecution::write_for_peers(std::byte* to, const std::byte* from,
                                      std::size_t bytes) const {
  if (way_ == CopyWay::past_cache) {
    copy_past_cache(to, from, bytes);
  } else {
    copy_to_peer(to, from, bytes);
  }
}

bool DirectExecution::try_copy_out() {
  if (!copying_out_.bytes) return false;
  const int rank = board_.rank(), size = board_.size();
  // Publishing some blocks ahead lets the peers finish theirs before this rank copies them out.
  const bool produces = is_consumer(rank) || is_publisher(rank);
  const bool due =
      !produces || (producing_.bytes ? published_ahead_ > lookahead_ : published_ahead_ > 0);
  if (!due || !have_posted()) return false;
  if (try_copy_share()) return true;
  // An input that is read remotely is complete from the beginning.
  const bool joins = !is_cut_ && reads_remotely(&DirectExecution::is_publisher);
  if (!joins && !reached(&Board::Counters::published, copying_out_.output_end,
                         &DirectExecution::is_publisher, seen_published_)) {
    return false;
  }
  if (all_share_ &&
      board_.counters(rank).published.load(std::memory_order_acquire) < copying_out_.output_end) {
    return false;
  }
  const Block block = joins ? join_blocks(copying_out_) : copying_out_;
  // A chunk of an all-reduce is in its publisher's output. In other calls it is in the input.
  auto mapped_of = [&](int r) {
    const auto& peer = board_.peers[static_cast<std::size_t>(r)];
    return is_cut_ ? peer.output : peer.input;
  };
  auto remote_of = [&](int r) {
    const auto& peer = board_.peers[static_cast<std::size_t>(r)];
    return is_cut_ ? peer.remote_output : peer.remote_input;
  };
  // The publishers with mapped parts write to this rank's output.
  const bool is_written_to = !is_cut_ && output_is_mapped_;
  bool in_place = false;
  for (int r = 0; r < size; ++r) {
    in_place = in_place || (r != rank && (mapped_of(r) || remote_of(r)));
  }
  PeerAccess access(board_, endpoint_, in_place);
  for (int i = all_share_ ? 0 : 1; i < size; ++i) {
    int peer = (rank + i) % size;
    if (!is_publisher(peer)) continue;
    const Span to = output_span(block, peer);
    if (!to.bytes) continue;
    const std::size_t offset = is_cut_ ? to.offset : single(block).offset;
    if (const std::uint64_t remote = remote_of(peer)) {
      read_remote(peer, remote + offset, call_.output + to.offset, to.bytes);
      continue;
    }
    const std::byte* mapped = mapped_of(peer);
    if (mapped && is_written_to) continue;
    const std::byte* from = mapped ? mapped + offset : published(peer, block);
    write(call_.output + to.offset, from, to.bytes);
  }
  access.check();
  if (!produces) copy_own(block);
  board_.counters(rank).copied_out.store(copying_out_.output_end, std::memory_order_release);
  board_.wake_others();
  --published_ahead_;
  share_is_copied_ = false;
  move_to_next(copying_out_);
  return true;
}

// In a broadcast of mapped arrays, copies this rank's share of the next block, without waiting for
// that of the root.
bool DirectExecution::try_copy_share() {
  const std::byte* from = board_.peers[static_cast<std::size_t>(call_.root)].input;
  const std::size_t share = readers_share(copying_out_.bytes);
  if (share_is_copied_ || !output_is_mapped_ || !from || share == 0) return false;
  PeerAccess access(board_, endpoint_, true);
  write(call_.output + copying_out_.begin, from + copying_out_.begin, share);
  access.check();
  share_is_copied_ = true;
  return true;
}

// Returns true if no peer reads or writes this rank's arrays any more.
bool DirectExecution::is_released() {
  if (input_is_read_ && is_source(board_.rank()) &&
      !reached(&Board::Counters::consumed, last_.input_end, &DirectExecution::is_consumer,
               seen_consumed_)) {
    return false;
  }
  bool is_read = is_cut_ ? output_is_read_ : input_is_read_ && is_publisher(board_.rank());
  if (writes_part()) is_read = false;
  if (is_cut_ && output_is_mapped_ &&
      !reached(&Board::Counters::published, last_.output_end, &DirectExecution::is_peer,
               seen_published_)) {
    return false;
  }
  return !is_read || reached(&Board::Counters::copied_out, last_.output_end,
                             &DirectExecution::is_reader, seen_copied_out_);
}

bool DirectExecution::reached(Counter counter, std::uint64_t position, Role role,
                              std::uint64_t& seen) const {
  if (seen >= position) return true;
  // A peer without this role may still read the data of an earlier call.
  std::uint64_t earlier = 0;
  if (counter == &Board::Counters::consumed) earlier = std::min(position, input_begin_);
  if (counter == &Board::Counters::copied_out) earlier = std::min(position, output_begin_);
  for (int r = 0; r < board_.size(); ++r) {
    if (r == board_.rank()) continue;
    const std::uint64_t needed = (this->*role)(r) ? position : earlier;
    if ((board_.counters(r).*counter).load(std::memory_order_acquire) < needed) return false;
  }
  seen = position;
  return true;
}

std::vector<int> DirectExecution::behind(Counter counter, std::uint64_t position, Role role) const {
  std::vector<int> found;
  for (int r = 0; r < board_.size(); ++r) {
    if (r == board_.rank() || !(this->*role)(r)) continue;
    if ((board_.counters(r).*counter).load() < position) found.push_back(r);
  }
  return found;
}

std::vector<int> DirectExecution::awaited() const {
  std::vector<int> found;
  for (int r = 0; r < board_.size(); ++r) {
    if (r == board_.rank()) continue;
    const bool is_ready =
        mode_ == Mode::not_posted
            ? board_.has_released(r, sequence_)
            : board_.slot(r, sequence_).sequence.load(std::memory_order_acquire) == sequence_;
    const bool is_needed = mode_ == Mode::not_posted || is_awaited(r);
    if (is_needed && !is_ready) found.push_back(r);
  }
  if (!found.empty() || mode_ != Mode::blocks) return found;
  // The earliest block first.
  using Counters = Board::Counters;
  using Self = DirectExecution;
  if (all_share_ && copying_out_.bytes && !producing_.bytes) {
    for (int r = 0; r < board_.size(); ++r) {
      const auto& counters = board_.counters(r);
      const int claimant = claimant_of(counters.claim.load());
      if (counters.published.load() < copying_out_.output_end && claimant != board_.rank()) {
        found.push_back(claimant);
      }
    }
    return found;
  }
  if (copying_out_.bytes && (published_ahead_ > 0 || !producing_.bytes)) {
    found = behind(&Counters::published, copying_out_.output_end, &Self::is_publisher);
  }
  if (found.empty() && producing_.bytes && is_consumer(board_.rank())) {
    found = behind(&Counters::staged, producing_.input_end, &Self::is_staging);
  }
  if (found.empty() && producing_.bytes && producing_.output_end > board_.output_bytes()) {
    found = behind(&Counters::copied_out, producing_.output_end - board_.output_bytes(),
                   &Self::is_reader);
  }
  if (found.empty() && staging_.bytes && staging_.input_end > board_.input_bytes()) {
    found =
        behind(&Counters::consumed, staging_.input_end - board_.input_bytes(), &Self::is_consumer);
  }
  if (found.empty() && is_source(board_.rank())) {
    found = behind(&Counters::consumed, last_.input_end, &Self::is_consumer);
  }
  if (found.empty()) found = behind(&Counters::copied_out, last_.output_end, &Self::is_reader);
  return found;
}

void combine_all(const DirectCall& call, void* const* targets, std::size_t num_targets,
                 const void* const* sources, int size, std::size_t count, std::size_t past_cache) {
  if (count == 0) return;
  const Reduction& reduction = *call.reduction;
  bool fused = !reduction.half || call.fused;
  if (call.past_cache && num_targets > 1) past_cache = num_targets;
  if (num_targets == 1 && size == 2 && past_cache == 0 && (!reduction.half || !fused)) {
    reduction.combine(targets[0], sources[0], sources[1], count);
    if (reduction.finish) reduction.finish(targets[0], count, size);
    return;
  }
  if (fused) {
    combine_many(call.dtype, call.op, targets, num_targets, sources, static_cast<std::size_t>(size),
                 count, size, past_cache);
    return;
  }
  // Half-precision sums, rounded after each contribution. A local block holds the partial result,
  // because a target may be one of the sources.
  alignas(kCacheLine) std::byte block[kReduceBlockBytes];
  std::size_t items = sizeof block / call.item;
  for (std::size_t first = 0; first < count; first += items) {
    std::size_t length = std::min(items, count - first), offset = first * call.item;
    auto source = [&](int r) { return static_cast<const std::byte*>(sources[r]) + offset; };
    std::memcpy(block, source(0), length * call.item);
    for (int r = 1; r < size; ++r) reduction.combine(block, block, source(r), length);
    if (reduction.finish) reduction.finish(block, length, size);
    for (std::size_t t = 0; t < num_targets; ++t) {
      std::memcpy(static_cast<std::byte*>(targets[t]) + offset, block, length * call.item);
    }
  }
}

}  // namespace pycollective
