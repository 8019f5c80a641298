// A model checker for the board (transport/board.h). It explores every interleaving of two or three
// ranks, and every point at which a rank dies or gives up. It runs the steps of executor/direct.cc
// itself.
//
//     model RANKS none|death|timeout   prints one line for each program; exits with 1 at the first
//                                      error.
//
// * A *program* is a list of calls that every rank makes.
// * A *state* is the contents of the board and of the arrays, and each rank's private variables.
// * An *action* is one step of one rank. The rank posts a slot, completes a short call, stages,
//   produces or copies out a block, ends a call, dies, gives up, or leaves.
//
// The search visits all reachable states, and reports
//
//   * data races: two ranks whose next steps access the same memory, one of them to write;
//   * wrong results;
//   * deadlocks;
//   * lost wake-ups: a step enables a rank that sleeps, and does not wake it;
//   * accesses to the arrays of a rank that is not in the call;
//   * after a death, a waiting rank that names neither the dead rank nor a rank that waits for it.
//
// Steps wait only for counters that grow. So two steps can run concurrently exactly if both are
// possible in one state, and each action can be explored as a whole. To claim a chunk is an action
// without data: of two ranks that can claim one, the first gets it.
//
// A rank can also give up in the middle of a peer's step, before and after the peer checks for a
// failure. The model does not reorder memory accesses; the tests with ThreadSanitizer cover that.
//
// The build uses -fno-access-control, -Wl,--wrap=memcpy to record every copy, and the small sizes
// of support/tuning.h in this folder.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "executor/direct.h"

using namespace pycollective;

namespace {

constexpr int kMaxRanks = 3;
constexpr int kPoison = 0xEE;  // fills the arrays between calls

enum class Faults { none, death, timeout };

struct GroupCall {
  Collective collective;
  int root;
  std::size_t count;         // bytes of the array, or of a part
  unsigned inputs, outputs;  // bit r: the peers can map rank r's array
  bool in_place = false;
  bool differs = false;      // rank 1 makes a different call
  unsigned remote = 0;       // bit r: the peers read rank r's arrays through the system
  bool has_lengths = false;  // an all_to_all with lengths for each pair of ranks
  unsigned different =
      0;  // bit r: rank r's parts differ. Messages move all parts, outside the model.
};

struct Program {
  std::string name;
  std::vector<GroupCall> calls;
  bool oversubscribed = false;
  bool distributed = false;  // a reduce of ordinary arrays, too
};

enum class Phase : std::uint8_t { between, calling, leaving, left, dead, finished };

struct Control {
  Phase phase[kMaxRanks];
  int call[kMaxRanks];
  bool failed;
};

// A rank's private variables of the board.
struct View {
  std::uint64_t sequence, input_position, output_position, posted, all_posted, seen_consumed,
      fingerprint;
  Board::Written written;
  Board::Peer peers[kMaxRanks];
};

struct alignas(DirectExecution) Execution {
  std::byte bytes[sizeof(DirectExecution)];
};
static_assert(std::is_trivially_destructible_v<DirectExecution>);

enum class Kind { enter, advance, stage, produce, copy_out, die, give_up, leave };
constexpr const char* kKinds[] = {"enters",     "advances", "stages",   "produces",
                                  "copies out", "dies",     "gives up", "leaves"};

// A peer that gives up within a step: before or after the step's check-th check for a failure.
struct Interruption {
  int peer = -1, check = 0;
  bool before = false;
};

struct Action {
  int rank;
  Kind kind;
  Interruption interruption;
};

struct Access {
  const std::byte* at;
  std::size_t bytes;
  bool writes;
};

struct ModelError {
  std::string what;
};

class Model* model;

class ModelBoard : public Board {
 public:
  using Board::Board;
  std::uint64_t handle_of(const void* data, std::size_t bytes) const override;
  std::byte* address_of(int peer, std::uint64_t handle, std::size_t bytes) override;
  CopyWay begin_long_call(Collective, std::size_t, CopyWay last) override;
  std::uint64_t remote_address(const void* data) override {
    return reinterpret_cast<std::uintptr_t>(data);
  }
  bool read_remote(int peer, std::uint64_t address, std::byte* to, std::size_t bytes) override;
  void mismatch(int peer) override;
  void cannot_read(int) override { std::abort(); }
  bool is_oversubscribed() const override;
};

class ModelEndpoint : public Endpoint {
 public:
  explicit ModelEndpoint(int rank) : rank_(rank) {}
  int rank() const override { return rank_; }
  Board* board() override;
  void check() override;
  SpinLimit spin_limit() override { return {}; }
  bool sleep(Clock::duration) override { return true; }
  void enter(const CallRecord&) override {}
  void leave() noexcept override {}
  bool try_send(int, const void*, std::size_t) override { std::abort(); }
  Piece try_receive(int, std::size_t) override { std::abort(); }
  void release(int) override { std::abort(); }
  bool flushed() override { return true; }
  bool flushed_to(int) override { return true; }
  CallRecord call() const override { return {}; }
  void fail(const Failure&) noexcept override {}

 private:
  Group& group() override { std::abort(); }
  int rank_;
};

class Model {
 public:
  Model(int size, Faults faults, const Program& program)
      : size_(size), faults_(faults), program_(program), reduction_{add, nullptr, 1, nullptr} {
    model = this;
    kCentralReduceRanks = program.distributed ? 0 : kMaxRanks;
    for (const GroupCall& call : program.calls) {
      for (int r = 0; r < size; ++r) {
        area_ = std::max({area_, length(call, true, r) + 128, length(call, false, r) + 128});
      }
    }
    area_ = (area_ + 63) / 64 * 64;
    board_bytes_ = Board::bytes_for(size, true);
    memory_.resize(board_bytes_ + 2 * area_ * static_cast<std::size_t>(size) + 64);
    auto start = reinterpret_cast<std::uintptr_t>(memory_.data());
    base_ = memory_.data() + (64 - start % 64) % 64;
    std::vector<WaitQueue*> queues;
    for (int r = 0; r < size; ++r) {
      queues_[r].sleepers.store(1);  // every rank that waits sleeps
      queues.push_back(&queues_[r]);
    }
    for (int r = 0; r < size; ++r) {
      boards_.push_back(std::make_unique<ModelBoard>(base_, r, queues, true));
      endpoints_.push_back(std::make_unique<ModelEndpoint>(r));
      std::memset(array(r, false, 0), kPoison, 2 * area_);
    }
    for (int r = 0; r < size; ++r) {
      const Board& b = *boards_[0];
      parts_.push_back({b.at(r), sizeof(Board::Slot) * kBoardSlots + sizeof(Board::Counters)});
      parts_.push_back({b.input_staging(r), b.input_bytes() + b.output_bytes()});
      parts_.push_back({array(r, false, 0), 2 * area_});
    }
    for (const Part& part : parts_) part_bytes_ += part.bytes;
    std::memset(&control_, 0, sizeof control_);
    std::memset(executions_, 0, sizeof executions_);
  }

  // Returns an error and the actions that lead to it; empty if there is none.
  std::string explore() {
    try {
      visit(hash());
      return {};
    } catch (const ModelError& wrong) {
      std::string text = wrong.what + ", after";
      for (const Action& action : path_) {
        text += "\n    rank " + std::to_string(action.rank) + " " +
                kKinds[static_cast<int>(action.kind)];
        if (action.interruption.peer >= 0) {
          text += ", within which rank " + std::to_string(action.interruption.peer) + " gives up " +
                  (action.interruption.before ? "before" : "after") + " check " +
                  std::to_string(action.interruption.check);
        }
      }
      return text;
    }
  }
  std::size_t states() const { return seen_.size(); }
  std::size_t actions() const { return actions_; }

  // Called by the board and the endpoints -----------------------------------------------

  ModelBoard& board(int rank) { return *boards_[static_cast<std::size_t>(rank)]; }
  bool oversubscribed() const { return program_.oversubscribed; }

  std::uint64_t handle_of(int rank, const void* data) const {
    const GroupCall& call = call_of(rank);
    const auto* at = static_cast<const std::byte*>(data);
    const bool is_output = at >= array(rank, true, 0) && at < array(rank, true, 0) + area_;
    const unsigned mask = is_output || call.in_place ? call.outputs : call.inputs;
    return mask >> rank & 1 ? reinterpret_cast<std::uint64_t>(data) : 0;
  }

  bool offers_remote_reads(int rank) const { return call_of(rank).remote >> rank & 1; }

  void check(int rank) {
    const Interruption now = interruption_;
    const bool here = now.peer >= 0 && checks_++ == now.check;
    if (here && now.before) give_up_and_leave(now.peer);
    const bool failed = control_.failed;
    if (here && !now.before) give_up_and_leave(now.peer);
    if (failed) throw Failure(FailureKind::timeout, "rank " + std::to_string(rank));
  }

  void record(const void* data, std::size_t bytes, bool writes) {
    if (!recording_ || bytes == 0) return;
    const auto* at = static_cast<const std::byte*>(data);
    if (at < base_ || at >= base_ + board_bytes_ + 2 * area_ * static_cast<std::size_t>(size_)) {
      return;  // on the stack
    }
    accesses_.push_back({at, bytes, writes});
    const auto offset = static_cast<std::size_t>(at - base_);
    if (offset < board_bytes_) return;
    const int owner = static_cast<int>((offset - board_bytes_) / (2 * area_));
    if (owner == acting_) return;
    if (is_in(owner, control_.call[acting_])) return;
    // A step may read the arrays of a rank that has left if it detects the failure afterwards.
    if (writes || control_.phase[owner] != Phase::left) {
      throw ModelError{"rank " + std::to_string(acting_) + (writes ? " writes" : " reads") +
                       " arrays of rank " + std::to_string(owner) + ", which is not in the call"};
    }
    read_stale_ = true;
  }

  void record_wake_up(const std::atomic<std::uint32_t>& word) {
    for (int r = 0; r < size_; ++r) {
      if (&queues_[r].wake_ups == &word) woken_ |= 1U << r;
    }
  }

 private:
  // Memory that belongs to the state.
  struct Part {
    std::byte* data;
    std::size_t bytes;
  };

  struct Snapshot {
    std::unique_ptr<std::byte[]> memory;  // of all parts
    Control control;
    View views[kMaxRanks];
    Execution executions[kMaxRanks];
  };

  static void add(void* target, const void* a, const void* b, std::size_t count) {
    model->record(a, count, false);
    model->record(b, count, false);
    model->record(target, count, true);
    for (std::size_t i = 0; i < count; ++i) {
      static_cast<std::uint8_t*>(target)[i] = static_cast<std::uint8_t>(
          static_cast<const std::uint8_t*>(a)[i] + static_cast<const std::uint8_t*>(b)[i]);
    }
  }

  // A rank's array. `shift` differs between ranks, so their arrays begin at different offsets in a
  // cache line.
  std::byte* array(int rank, bool output, int shift) const {
    return base_ + board_bytes_ + static_cast<std::size_t>(2 * rank + (output ? 1 : 0)) * area_ +
           shift;
  }
  std::byte* input_of(int rank) const {
    return call_of(rank).in_place ? output_of(rank) : array(rank, false, 8 * (rank + 1));
  }
  std::byte* output_of(int rank) const { return array(rank, true, 8 * (3 - rank)); }
  const GroupCall& call_of(int rank) const {
    return program_.calls[static_cast<std::size_t>(control_.call[rank])];
  }
  DirectExecution& execution(int rank) {
    return *reinterpret_cast<DirectExecution*>(executions_[rank].bytes);
  }
  // Returns true if peers may access a rank's arrays for a call. They may until a rank that gives
  // up has left. The arrays of a dead rank stay mapped.
  bool is_in(int rank, int call) const {
    const Phase phase = control_.phase[rank];
    return control_.call[rank] == call &&
           (phase == Phase::calling || phase == Phase::leaving || phase == Phase::dead);
  }

  // States ---------------------------------------------------------------------------------

  Snapshot save() const {
    Snapshot snapshot{std::make_unique_for_overwrite<std::byte[]>(part_bytes_), control_, {}, {}};
    std::byte* to = snapshot.memory.get();
    for (const Part& part : parts_) {
      std::memcpy(to, part.data, part.bytes);
      to += part.bytes;
    }
    for (int r = 0; r < size_; ++r) snapshot.views[r] = view_of(r);
    std::memcpy(snapshot.executions, executions_, sizeof executions_);
    return snapshot;
  }

  void restore(const Snapshot& snapshot) {
    const std::byte* from = snapshot.memory.get();
    for (const Part& part : parts_) {
      std::memcpy(part.data, from, part.bytes);
      from += part.bytes;
    }
    control_ = snapshot.control;
    for (int r = 0; r < size_; ++r) {
      Board& b = *boards_[static_cast<std::size_t>(r)];
      const View& view = snapshot.views[r];
      b.sequence = view.sequence;
      b.input_position = view.input_position;
      b.output_position = view.output_position;
      b.posted_fingerprint = view.posted;
      b.all_posted = view.all_posted;
      b.seen_consumed = view.seen_consumed;
      b.fingerprint = view.fingerprint;
      b.written = view.written;
      for (int p = 0; p < size_; ++p) b.peers[static_cast<std::size_t>(p)] = view.peers[p];
    }
    std::memcpy(executions_, snapshot.executions, sizeof executions_);
  }

  View view_of(int rank) const {
    const Board& b = *boards_[static_cast<std::size_t>(rank)];
    View view{b.sequence,           b.input_position, b.output_position,
              b.posted_fingerprint, b.all_posted,     b.seen_consumed,
              b.fingerprint,        b.written,        {}};
    for (int p = 0; p < size_; ++p) view.peers[p] = b.peers[static_cast<std::size_t>(p)];
    return view;
  }

  // Returns a hash of the state. States with the same 64-bit hash count as one state.
  std::uint64_t hash() const {
    using Word [[gnu::may_alias]] = std::uint64_t;
    constexpr std::size_t kLanes = 8;  // independent, so that the multiplications overlap
    std::uint64_t lanes[kLanes] = {1, 2, 3, 4, 5, 6, 7, 8};
    auto mix_word = [](std::uint64_t& lane, std::uint64_t word) {
      lane = (lane ^ word) * 0xFF51AFD7ED558CCDU;
      lane ^= lane >> 32;
    };
    auto mix = [&](const void* data, std::size_t bytes) {
      const auto* words = static_cast<const Word*>(data);
      const std::size_t count = bytes / sizeof(Word), whole = count / kLanes * kLanes;
      for (std::size_t i = 0; i < whole; i += kLanes) {
        for (std::size_t lane = 0; lane < kLanes; ++lane) mix_word(lanes[lane], words[i + lane]);
      }
      for (std::size_t i = whole; i < count; ++i) mix_word(lanes[i - whole], words[i]);
    };
    for (const Part& part : parts_) mix(part.data, part.bytes);
    for (int r = 0; r < size_; ++r) {
      mix_word(lanes[0], static_cast<std::uint64_t>(control_.phase[r]));
      mix_word(lanes[0], static_cast<std::uint64_t>(control_.call[r]));
      const View view = view_of(r);
      mix(&view, sizeof view);
    }
    mix_word(lanes[0], control_.failed ? 1 : 0);
    mix(executions_, sizeof executions_);
    for (std::size_t lane = 1; lane < kLanes; ++lane) mix_word(lanes[0], lanes[lane]);
    return lanes[0];
  }

  // Actions --------------------------------------------------------------------------------

  // Takes a step and records its memory accesses in accesses_. Returns false if it is not possible.
  bool try_step(const Action& action) {
    accesses_.clear();
    woken_ = 0;
    read_stale_ = false;
    checks_ = 0;
    interruption_ = action.interruption;
    acting_ = action.rank;
    const int rank = action.rank;
    Board& b = board(rank);
    const std::uint64_t sequence = b.sequence, all_posted = b.all_posted;
    const int call = control_.call[rank];
    recording_ = true;
    bool moved = false;
    try {
      moved = run(rank, action.kind);
    } catch (const Failure&) {
      recording_ = false;
      control_.failed = true;
      control_.phase[rank] = Phase::leaving;
      return true;
    } catch (...) {
      recording_ = false;
      throw;
    }
    if (moved && read_stale_) {
      throw ModelError{"rank " + std::to_string(rank) +
                       " uses data that it read from a rank that has left"};
    }
    // No memcpy() accesses the slots.
    if (b.sequence != sequence) record(&b.slot(rank, b.sequence), sizeof(Board::Slot), true);
    for (int r = 0; r < size_; ++r) {
      if (r == rank) continue;
      if (b.all_posted != all_posted) record(&b.slot(r, b.all_posted), sizeof(Board::Slot), false);
      if (slots_read_ >> r & 1) record(&b.slot(r, b.sequence), sizeof(Board::Slot), false);
    }
    recording_ = false;
    if (moved && control_.call[rank] != call) poison(rank);
    return moved;
  }

  bool run(int rank, Kind kind) {
    slots_read_ = 0;
    switch (kind) {
      case Kind::enter:
        enter(rank);
        return true;
      case Kind::advance:
        return advance(rank);
      case Kind::stage:
        return execution(rank).try_stage();
      case Kind::produce:
        return record_slots_read(rank, [&] { return execution(rank).try_produce(); });
      case Kind::copy_out:
        return record_slots_read(rank, [&] { return execution(rank).try_copy_out(); });
      case Kind::die:
        control_.phase[rank] = Phase::dead;
        return true;
      case Kind::give_up:
        control_.failed = true;
        control_.phase[rank] = Phase::leaving;
        return true;
      case Kind::leave:
        return leave(rank);
    }
    return false;
  }

  template <class Step>
  bool record_slots_read(int rank, const Step& step) {
    DirectExecution& mine = execution(rank);
    const int before = mine.checked_;
    const bool moved = step();
    for (int r = before; r < mine.checked_; ++r) {
      if (mine.is_awaited(r)) slots_read_ |= 1U << r;
    }
    return moved;
  }

  void enter(int rank) {
    if (control_.failed) {
      control_.phase[rank] = Phase::left;
      return;
    }
    control_.phase[rank] = Phase::calling;
    const GroupCall& call = call_of(rank);
    const std::uint64_t other = call.differs && rank == 1 ? 1000 : 0;
    board(rank).fingerprint = board(rank).posted_fingerprint * 31 + 7 + other;
    recording_ = false;
    fill(rank);
    recording_ = true;
    static DirectCall mine;  // static: its padding, a part of the state, is zero
    mine.collective = call.collective;
    mine.root = call.root;
    mine.input = input_of(rank);
    mine.output = output_of(rank);
    mine.count = call.count;
    mine.item = 1;
    mine.dtype = DType::u8;
    mine.reduction = &reduction_;
    const bool differs = call.different >> rank & 1;
    mine.parts = !call.has_lengths ? Parts::equal : differs ? Parts::different : Parts::own_equal;
    if (differs) mine.count = 0;
    std::memset(executions_[rank].bytes, 0, sizeof(Execution));
    new (executions_[rank].bytes)
        DirectExecution(*endpoints_[static_cast<std::size_t>(rank)], mine);
  }

  bool advance(int rank) {
    const Progress progress = [&] {
      Progress result = Progress::blocked;
      record_slots_read(rank, [&] {
        result = execution(rank).advance();
        return true;
      });
      return result;
    }();
    if (progress == Progress::done) {
      if (execution(rank).parts_differ() != (call_of(rank).different != 0)) {
        throw ModelError{"rank " + std::to_string(rank) + " is wrong about the other ranks' parts"};
      }
      check_result(rank);
      board(rank).written = {};
      ++control_.call[rank];
      const bool last = control_.call[rank] == static_cast<int>(program_.calls.size());
      control_.phase[rank] = last ? Phase::finished : Phase::between;
    }
    return progress != Progress::blocked;
  }

  // As ShmEndpoint::leave() after a failure.
  bool leave(int rank) {
    if (board(rank).written.bytes && board(rank).is_any_peer_accessing()) return false;
    board(rank).written = {};
    control_.phase[rank] = Phase::left;
    const bool was = std::exchange(recording_, false);
    poison(rank);
    recording_ = was;
    return true;
  }
  void give_up_and_leave(int rank) {
    control_.failed = true;
    control_.phase[rank] = Phase::leaving;
    leave(rank);
  }

  std::vector<Action> possible(int rank) const {
    std::vector<Action> found;
    auto offer = [&](Kind kind) { found.push_back({rank, kind, {}}); };
    switch (control_.phase[rank]) {
      case Phase::between:
        offer(Kind::enter);
        break;
      case Phase::leaving:
        offer(Kind::leave);
        break;
      case Phase::calling: {
        const auto& mine = const_cast<Model*>(this)->execution(rank);
        if (mine.mode_ == DirectExecution::Mode::blocks) {
          offer(Kind::stage);
          offer(Kind::produce);
          offer(Kind::copy_out);
        }
        offer(Kind::advance);
        if (faults_ == Faults::timeout) {
          offer(Kind::give_up);
          std::vector<Action> steps = found;
          for (const Action& step : steps) {
            if (step.kind != Kind::produce && step.kind != Kind::copy_out) continue;
            for (int peer = 0; peer < size_; ++peer) {
              if (peer == rank || control_.phase[peer] != Phase::calling) continue;
              for (int side = 0; side < 4; ++side) {
                found.push_back({rank, step.kind, {peer, side / 2, side % 2 == 0}});
              }
            }
          }
        }
        const bool one_died = std::any_of(control_.phase, control_.phase + size_,
                                          [](Phase phase) { return phase == Phase::dead; });
        if (faults_ == Faults::death && !one_died) offer(Kind::die);
        break;
      }
      default:
        break;
    }
    return found;
  }
  // A step of the protocol, in contrast to a fault.
  static bool is_step(const Action& action) {
    return action.kind != Kind::die && action.kind != Kind::give_up && action.interruption.peer < 0;
  }

  // The search -----------------------------------------------------------------------------

  // Explores all states that follow the present one, which is new. Returns a mask of the ranks that
  // can take a step in the present state.
  unsigned visit(std::uint64_t key) {
    const Snapshot here = save();
    // Finds the possible steps, then the races between them.
    struct Step {
      Action action;
      std::vector<Access> accesses;
      unsigned woken;
      bool failed;
      std::uint64_t then;
    };
    std::vector<Step> steps;
    unsigned enabled = 0;
    for (int rank = 0; rank < size_; ++rank) {
      bool blocks_moved = false;
      for (const Action& action : possible(rank)) {
        // A call can end only if no block can move.
        if (action.kind == Kind::advance && blocks_moved) continue;
        path_.push_back(action);
        const bool moved = try_step(action);
        path_.pop_back();
        if (moved) {
          steps.push_back({action, accesses_, woken_, control_.failed, hash()});
          if (is_step(action)) {
            enabled |= 1U << rank;
            blocks_moved = true;
          }
        }
        restore(here);
      }
    }
    for (const Step& a : steps) {
      for (const Step& b : steps) {
        if (a.action.rank < b.action.rank) compare(a.action, a.accesses, b.action, b.accesses);
      }
    }
    seen_[key] = enabled;
    if (enabled == 0) check_end();
    for (const Step& step : steps) {
      path_.push_back(step.action);
      ++actions_;
      unsigned then;
      if (const auto known = seen_.find(step.then); known != seen_.end()) {
        then = known->second;
      } else {
        try_step(step.action);
        then = visit(step.then);
        restore(here);
      }
      // A rank that this step enables must have been woken by it.
      for (int r = 0; r < size_; ++r) {
        const unsigned bit = 1U << r;
        if (r == step.action.rank || !is_step(step.action) || step.failed) continue;
        if (!(enabled & bit) && (then & bit) && !(step.woken & bit)) {
          throw ModelError{"rank " + std::to_string(r) + " can continue, and no rank wakes it"};
        }
      }
      path_.pop_back();
    }
    return enabled;
  }

  static void compare(const Action& one, const std::vector<Access>& ones, const Action& other,
                      const std::vector<Access>& others) {
    for (const Access& a : ones) {
      for (const Access& b : others) {
        if (!a.writes && !b.writes) continue;
        if (a.at < b.at + b.bytes && b.at < a.at + a.bytes) {
          throw ModelError{"rank " + std::to_string(one.rank) + ", which " +
                           kKinds[static_cast<int>(one.kind)] + ", and rank " +
                           std::to_string(other.rank) + ", which " +
                           kKinds[static_cast<int>(other.kind)] + ", race in memory"};
        }
      }
    }
  }

  // Checks a state in which no rank can take a step.
  void check_end() {
    bool died = false, differs = false;
    for (int r = 0; r < size_; ++r) died = died || control_.phase[r] == Phase::dead;
    for (const GroupCall& call : program_.calls) differs = differs || call.differs;
    if (differs && !died && !control_.failed) throw ModelError{"no rank reports the mismatch"};
    if (control_.failed) return;
    for (int r = 0; r < size_; ++r) {
      if (control_.phase[r] == Phase::finished || control_.phase[r] == Phase::dead) continue;
      if (!died) throw ModelError{"rank " + std::to_string(r) + " waits forever"};
      if (!waits_for_dead(r, 0)) {
        throw ModelError{"rank " + std::to_string(r) + " does not name the dead rank"};
      }
    }
  }
  // Returns true if a rank waits for the dead rank, directly or through other ranks.
  bool waits_for_dead(int rank, int depth) {
    if (control_.phase[rank] == Phase::dead) return true;
    if (control_.phase[rank] != Phase::calling || depth > size_) return false;
    const std::vector<int> awaited = execution(rank).awaited();
    return !awaited.empty() && std::any_of(awaited.begin(), awaited.end(), [&](int next) {
      return waits_for_dead(next, depth + 1);
    });
  }

  // Arrays ---------------------------------------------------------------------------------

  static std::uint8_t value(int call, int rank, std::size_t i) {
    return static_cast<std::uint8_t>(101 * call + 31 * rank + 7 * static_cast<int>(i) + 1);
  }
  void poison(int rank) { std::memset(array(rank, false, 0), kPoison, 2 * area_); }

  std::size_t length(const GroupCall& call, bool input, int rank) const {
    const auto size = static_cast<std::size_t>(size_);
    const bool root = rank == call.root;
    switch (call.collective) {
      case Collective::barrier:
        return 0;
      case Collective::reduce_scatter:
        return input ? call.count * size : call.count;
      case Collective::all_to_all:
        return call.count * size;
      case Collective::scatter:
        return input ? (root ? call.count * size : 0) : call.count;
      case Collective::gather:
        return input ? call.count : (root ? call.count * size : 0);
      case Collective::all_gather:
        return input ? call.count : call.count * size;
      case Collective::broadcast:
        return input ? (root ? call.count : 0) : call.count;
      case Collective::reduce:
        return input || root ? call.count : 0;
      default:
        return call.count;
    }
  }

  void fill(int rank) {
    const GroupCall& call = call_of(rank);
    for (std::size_t i = 0; i < length(call, true, rank); ++i) {
      input_of(rank)[i] = std::byte{value(control_.call[rank], rank, i)};
    }
  }

  void check_result(int rank) {
    const GroupCall& call = call_of(rank);
    const int k = control_.call[rank];
    if (call.different) {
      const std::byte* output = output_of(rank);
      const bool is_untouched = std::all_of(output, output + length(call, false, rank),
                                            [](std::byte b) { return b == std::byte{kPoison}; });
      if (!is_untouched) throw ModelError{"the board has moved parts of different lengths"};
      return;
    }
    auto sum = [&](std::size_t i) {
      int total = 0;
      for (int r = 0; r < size_; ++r) total += value(k, r, i);
      return static_cast<std::uint8_t>(total);
    };
    const auto own = static_cast<std::size_t>(rank) * call.count;
    for (std::size_t i = 0; i < length(call, false, rank); ++i) {
      const auto part = static_cast<int>(i / call.count);
      const std::size_t within = i % call.count;
      std::uint8_t expected = 0;
      switch (call.collective) {
        case Collective::all_reduce:
        case Collective::reduce:
          expected = sum(i);
          break;
        case Collective::reduce_scatter:
          expected = sum(own + i);
          break;
        case Collective::broadcast:
          expected = value(k, call.root, i);
          break;
        case Collective::scatter:
          expected = value(k, call.root, own + i);
          break;
        case Collective::all_to_all:
          expected = value(k, part, own + within);
          break;
        default:
          expected = value(k, part, within);
      }
      if (output_of(rank)[i] != std::byte{expected}) {
        throw ModelError{"rank " + std::to_string(rank) + " has a wrong byte " + std::to_string(i) +
                         " in call " + std::to_string(k)};
      }
    }
  }

  const int size_;
  const Faults faults_;
  const Program& program_;
  const Reduction reduction_;
  std::size_t area_ = 0, board_bytes_ = 0;
  std::vector<std::byte> memory_;
  std::byte* base_ = nullptr;
  std::vector<Part> parts_;
  std::size_t part_bytes_ = 0;
  WaitQueue queues_[kMaxRanks];
  std::vector<std::unique_ptr<ModelBoard>> boards_;
  std::vector<std::unique_ptr<ModelEndpoint>> endpoints_;
  Execution executions_[kMaxRanks];
  Control control_;

  // The step under way.
  bool recording_ = false, read_stale_ = false;
  int acting_ = 0, checks_ = 0;
  unsigned woken_ = 0;
  unsigned slots_read_ = 0;  // the ranks whose slots of this call the step has read
  Interruption interruption_;
  std::vector<Access> accesses_;

  std::unordered_map<std::uint64_t, unsigned> seen_;  // hash → the ranks that can take a step
  std::vector<Action> path_;
  std::size_t actions_ = 0;
};

std::uint64_t ModelBoard::handle_of(const void* data, std::size_t) const {
  return model->handle_of(rank(), data);
}
std::byte* ModelBoard::address_of(int, std::uint64_t handle, std::size_t) {
  return reinterpret_cast<std::byte*>(handle);
}
CopyWay ModelBoard::begin_long_call(Collective, std::size_t, CopyWay last) {
  const bool reads = last == CopyWay::remote_read && model->offers_remote_reads(rank());
  return reads ? CopyWay::remote_read : CopyWay::plain;
}
bool ModelBoard::read_remote(int, std::uint64_t address, std::byte* to, std::size_t bytes) {
  std::memcpy(to, reinterpret_cast<const void*>(address), bytes);
  return true;
}
void ModelBoard::mismatch(int peer) {
  throw Failure(FailureKind::mismatch, "with rank " + std::to_string(peer));
}
bool ModelBoard::is_oversubscribed() const { return model->oversubscribed(); }
Board* ModelEndpoint::board() { return &model->board(rank_); }
void ModelEndpoint::check() { model->check(rank_); }

}  // namespace

// Stubs of functions in files that are not linked
// -----------------------------------------------------------------------

extern "C" void* __real_memcpy(void* target, const void* source, std::size_t bytes);
extern "C" void* __wrap_memcpy(void* target, const void* source, std::size_t bytes) {
  if (model) {
    model->record(source, bytes, false);
    model->record(target, bytes, true);
  }
  return __real_memcpy(target, source, bytes);
}

namespace pycollective {

bool can_interrupt() { return false; }
bool heavy_barrier() { return true; }
bool futex_wait(std::atomic<std::uint32_t>&, std::uint32_t, std::chrono::nanoseconds) {
  return true;
}
void futex_wake_all(std::atomic<std::uint32_t>& word) { model->record_wake_up(word); }

void combine_many(DType, Op, void* const* targets, std::size_t num_targets,
                  const void* const* sources, std::size_t num_sources, std::size_t count, int,
                  std::size_t) {
  for (std::size_t s = 0; s < num_sources; ++s) model->record(sources[s], count, false);
  for (std::size_t t = 0; t < num_targets; ++t) model->record(targets[t], count, true);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint8_t sum = 0;
    for (std::size_t s = 0; s < num_sources; ++s) {
      sum = static_cast<std::uint8_t>(sum + static_cast<const std::uint8_t*>(sources[s])[i]);
    }
    for (std::size_t t = 0; t < num_targets; ++t) static_cast<std::uint8_t*>(targets[t])[i] = sum;
  }
}

}  // namespace pycollective

namespace {

// Returns a length that needs `blocks` blocks.
std::size_t blocks_of(std::size_t blocks, bool is_cut, int size) {
  const std::size_t chunk = kStagedChunkBytes;
  return chunk * blocks * (is_cut ? static_cast<std::size_t>(size) : 1) - chunk + 1;
}

// Adds the programs of one collective. `distributed`: each rank combines a chunk in every reduce.
void add_programs(std::vector<Program>& list, Collective kind, bool distributed, int size,
                  bool faults) {
  const std::size_t first = list.size();
  const unsigned all = (1U << size) - 1;
  const bool is_cut = kind == Collective::all_reduce || distributed;
  const std::string name = (distributed ? "distributed " : "") + std::string(to_string(kind));
  const std::size_t blocks = blocks_of(2, is_cut, size);
  // Data in the slot, in the staging ring, in blocks, and in the slot again.
  list.push_back({name + ", short and long",
                  {{kind, 0, 5, 0, 0},
                   {kind, size - 1, 60 / static_cast<std::size_t>(size), 0, 0},
                   {kind, 0, blocks, 0, 0},
                   {kind, 1, 5, 0, 0}}});
  // Ranks that wait for no peer run ahead.
  list.push_back({name + ", short, often",
                  {{kind, 0, 5, 0, 0},
                   {kind, 0, 5, 0, 0},
                   {kind, 0, 5, 0, 0},
                   {kind, 0, 5, 0, 0},
                   {kind, size - 1, 5, 0, 0},
                   {kind, 0, 5, 0, 0}}});
  // Every combination of mapped arrays. Outputs are mapped only in calls in which peers write to
  // them.
  const bool written = kind == Collective::all_reduce || kind == Collective::reduce ||
                       kind == Collective::broadcast || kind == Collective::gather;
  for (unsigned inputs = 0; inputs <= all; ++inputs) {
    for (unsigned outputs = 0; outputs <= (written ? all : 0); ++outputs) {
      // With three ranks: the arrays of no rank, of one rank, and of all ranks.
      auto is_one = [](unsigned mask) { return (mask & (mask - 1)) == 0; };
      if (size > 2 && !(is_one(inputs) || inputs == all)) continue;
      if (size > 2 && !(is_one(outputs) || outputs == all)) continue;
      list.push_back({name + ", inputs " + std::to_string(inputs) + " and outputs " +
                          std::to_string(outputs) + " mapped",
                      {{kind, 0, blocks, inputs, outputs}, {kind, 1, blocks, inputs, outputs}}});
    }
  }
  // Every combination of arrays that the peers read remotely, and one with a mapped array.
  for (unsigned remote = 1; remote <= all; ++remote) {
    if (size > 2 && remote != 1 && remote != all) continue;
    const std::string which = name + ", rank mask " + std::to_string(remote) + " remote";
    GroupCall call{kind, 0, blocks, 0, 0};
    call.remote = remote;
    list.push_back({which, {call, call}});
    call.root = 1;
    list.back().calls.push_back(call);
    call.inputs = call.outputs = remote & 1 ? 2 : 1;
    if (!written) call.outputs = 0;
    list.push_back({which + ", one rank mapped", {call, call}});
  }
  // More blocks than a remote read joins.
  const bool joins = !reduces(kind);
  for (unsigned remote = 1; joins && remote <= all; ++remote) {
    if (size > 2 && remote != 1 && remote != all) continue;
    GroupCall call{kind, 0, blocks_of(5, is_cut, size), 0, 0};
    call.remote = remote;
    list.push_back({name + ", rank mask " + std::to_string(remote) + " remote, long", {call}});
  }
  // More blocks than fit into the staging rings.
  if (size == 2 || (!faults && kind != Collective::all_to_all)) {
    const std::size_t many = blocks_of(size == 2 ? 20 : 6, is_cut, size);
    list.push_back({name + ", long", {{kind, 0, many, 0, 0}}});
    list.push_back({name + ", long, oversubscribed", {{kind, 0, many, 0, 0}}, true});
  }
  // More ranks than cores: the ranks claim the chunks of a block. The last program fills the rings.
  if (kind == Collective::all_reduce) {
    const std::size_t one = blocks_of(1, true, size),
                      full = kStagedChunkBytes * static_cast<std::size_t>(size);
    const GroupCall staged{kind, 0, one, 0, 0}, whole{kind, 0, full, 0, 0, true};
    GroupCall mapped = staged;
    mapped.inputs = 2;
    list.push_back({name + ", claimed chunks", {staged, whole, staged}, true});
    list.push_back({name + ", claimed chunks, or one rank mapped", {staged, mapped, staged}, true});
    if (size == 2)
      list.push_back({name + ", claimed chunks, often", std::vector<GroupCall>(7, whole), true});
  }
  Program differs{name + ", one rank makes a different call",
                  {{kind, 0, 5, 0, 0}, {kind, 0, blocks, 0, 0}, {Collective::barrier, 0, 0, 0, 0}}};
  differs.calls[1].differs = true;
  if (!faults) list.push_back(differs);
  for (std::size_t i = first; i < list.size(); ++i) list[i].distributed = distributed;
}

// Adds programs with an all_to_all whose parts may differ, between two others that use the rings.
void add_different_parts(std::vector<Program>& list, int size) {
  const unsigned all = (1U << size) - 1;
  const Collective kind = Collective::all_to_all;
  const std::size_t blocks = blocks_of(2, false, size);
  for (unsigned different = 0; different <= all; ++different) {
    if (size > 2 && different != 0 && different != 1 && different != all) continue;
    for (const std::size_t part : {std::size_t{5}, blocks}) {
      for (const unsigned remote : {0U, all}) {
        if (part != blocks && remote) continue;
        GroupCall call{kind, 0, part, 0, 0};
        call.has_lengths = true;
        call.different = different;
        call.remote = remote;
        GroupCall mapped = call;
        mapped.inputs = 1;
        const GroupCall plain{kind, 0, 60 / static_cast<std::size_t>(size), 0, 0};
        const std::string name = "all_to_all, different parts of rank mask " +
                                 std::to_string(different) + ", " + std::to_string(part) +
                                 " bytes" + (remote ? ", remote" : "");
        list.push_back({name, {plain, call, plain}});
        if (size == 2 && part != blocks) {  // the places wrap around the end of the ring
          list.push_back({name + ", often", std::vector<GroupCall>(40, call)});
        }
        if (!remote) list.push_back({name + ", one rank mapped", {call, mapped, plain}});
      }
    }
  }
}

std::vector<Program> programs(int size, bool faults) {
  std::vector<Program> list;
  const unsigned all = (1U << size) - 1;
  for (int c = 0; c < kDirectCollectives; ++c) {
    const auto kind = static_cast<Collective>(c);
    if (kind == Collective::barrier) {
      list.push_back({"barrier", {{kind, 0, 0, 0, 0}, {kind, 0, 0, 0, 0}, {kind, 0, 0, 0, 0}}});
      continue;
    }
    add_programs(list, kind, false, size, faults);
    if (kind == Collective::reduce) add_programs(list, kind, true, size, faults);
  }
  add_different_parts(list, size);
  const std::size_t blocks = blocks_of(2, true, size);
  for (unsigned mask = 0; mask <= all; ++mask) {
    list.push_back({"all_reduce in place, " + std::to_string(mask) + " mapped",
                    {{Collective::all_reduce, 0, blocks, mask, mask, true},
                     {Collective::all_reduce, 0, blocks, mask, mask, true}}});
  }
  GroupCall in_place{Collective::all_reduce, 0, blocks, 0, 0, true};
  in_place.remote = all;
  list.push_back({"all_reduce in place, remote", {in_place, in_place}});
  // A reduce of mapped arrays, in two blocks and in one; then one that only the root combines.
  for (const bool in_place : {false, true}) {
    list.push_back({in_place ? "reduce of mapped arrays in place" : "reduce of mapped arrays",
                    {{Collective::reduce, 0, blocks, all, all, in_place},
                     {Collective::reduce, 1, blocks / 2, all, all, in_place},
                     {Collective::reduce, 0, blocks / 2, all, 0}}});
  }
  return list;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string names[] = {"none", "death", "timeout"};
  const auto* name = argc == 3 ? std::find(names, names + 3, argv[2]) : names + 3;
  const int size = argc == 3 ? std::atoi(argv[1]) : 0;
  if (size < 2 || size > kMaxRanks || name == names + 3) {
    std::fprintf(stderr, "use: model 2|3 none|death|timeout\n");
    return 2;
  }
  const auto faults = static_cast<Faults>(name - names);
  for (const Program& program : programs(size, faults != Faults::none)) {
    Model search(size, faults, program);
    const std::string wrong = search.explore();
    model = nullptr;
    std::printf("%s: %zu states, %zu actions%s%s\n", program.name.c_str(), search.states(),
                search.actions(), wrong.empty() ? "" : ". WRONG: ", wrong.c_str());
    std::fflush(stdout);
    if (!wrong.empty()) return 1;
  }
  return 0;
}
