// The direct path: collective calls of ranks that share a board (transport/board.h), without
// messages. A call has at most two phases, each of which every rank goes through in blocks:
//
//   exchange  a source offers one chunk to each consumer, which combines or copies what it finds;
//   publish   a publisher offers one chunk to all takers, which copy it.
//
//                    exchange                            publish
//   all_reduce       chunk r of all arrays, to rank r    chunk r of the result
//   reduce           all arrays, to the root;
//     or, mapped     chunk r of all arrays, to rank r
//   reduce_scatter   part r of all arrays, to rank r
//   scatter          part r of the root's, to rank r
//   all_to_all       part r of all arrays, to rank r
//   broadcast                                            the root's array
//   gather                                               the ranks' parts, to the root
//   all_gather                                           the ranks' parts
//   barrier          nothing
//
// Memory that peers reach (mapped memory) is read where it is; the chunks of other memory pass
// through the board's staging. Where peers also reach the output of an all_reduce, or of a reduce
// whose inputs are all mapped, they write their results there. Short calls post their data beside
// their slots, and every rank reads what concerns it. Contributions are combined in the order of
// the schedules "direct", and give the same bits, but for halves, which are rounded once here
// unless a call is to be reproducible. benchmarks/executor_overhead.py and compare.py measure it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "reduce/reduce.h"
#include "schedule/collective.h"
#include "transport/board.h"
#include "transport/transport.h"

namespace pycollective {

// One rank's part of such a call.
struct DirectCall {
  Collective collective = Collective::all_reduce;
  int root = 0;
  const std::byte* input = nullptr;  // nullptr where the rank has none
  std::byte* output = nullptr;
  std::size_t count = 0;  // items of the whole array; where chunks are parts, of a part
  std::size_t item = 1;
  DType dtype = DType::f32;
  Op op = Op::sum;
  const Reduction* reduction = nullptr;  // of both
  // Halves are rounded once, after all contributions. Ranks that send each other messages round
  // after each.
  bool fused = true;
};

// Combines all ranks' arrays, in one pass over memory.
void combine_all(const DirectCall& call, void* const* targets, std::size_t num_targets,
                 const void* const* sources, int size, std::size_t count);

class DirectExecution {
 public:
  // Posts this rank's slot if the board is free for it. The endpoint has entered the call.
  DirectExecution(Endpoint& endpoint, const DirectCall& call);

  // Does what can be done without waiting, or some megabytes of it.
  Progress advance();
  // The ranks without which it does not go on.
  [[gnu::cold]] std::vector<int> awaited() const;
  // Peers need nothing more of this rank: it may complete the call when it likes.
  bool is_posted() const { return mode_ == Mode::one_shot; }

 private:
  enum class Mode { entering, alone, one_shot, blocks };
  using Counter = std::atomic<std::uint64_t> Board::Counters::*;
  using Role = bool (DirectExecution::*)(int rank) const;

  // Bytes [offset, offset + bytes) of an array.
  struct Span {
    std::size_t offset, bytes;
  };
  // One chunk of each rank, of which all ranks have the same idea.
  struct Block {
    std::size_t begin = 0;       // its first byte: of the array, or of each part
    std::size_t bytes = 0;       // of the array, or of each part; 0: there are no more blocks
    std::size_t chunk = 0;       // of a rank; the last ones may be shorter
    std::size_t stride = 0;      // from one chunk to the next in staging
    std::uint64_t input_at = 0;  // its places in the staging of the exchange, and of publishing
    std::uint64_t input_end = 0;
    std::uint64_t output_at = 0;
    std::uint64_t output_end = 0;
  };

  // The roles of the ranks in a collective, as above, and the arrays that they have.
  struct Roles;
  static const Roles& roles_of(Collective collective);
  static const Roles kSharedReduce;
  bool is_one_of(std::uint8_t who, int rank) const;
  bool is_source(int rank) const;
  bool is_consumer(int rank) const;
  bool is_publisher(int rank) const;
  bool is_taker(int rank) const;
  bool is_staging(int rank) const;  // a source that peers do not reach
  bool is_awaited(int rank) const;  // this rank needs something of it
  bool is_peer(int) const { return true; }
  bool has_exchange() const;
  bool has_publishing() const;

  std::size_t input_bytes(int rank) const;
  std::size_t output_bytes(int rank) const;
  std::size_t bytes_of(std::uint8_t length) const;
  Span chunk_of(const Block& block, int rank) const;
  Span single(const Block& block) const;
  Span input_span(const Block& block, int rank) const;   // of any array, for consumer `rank`
  Span output_span(const Block& block, int rank) const;  // of this rank's, from source `rank`

  bool post();
  void begin_blocks();
  bool have_all_mapped() const;
  void lay_out(Block& block) const;
  void go_on(Block& block) const;  // to the next one
  bool have_come();
  void complete_alone();
  void complete_one_shot();
  const std::byte* shot(int rank) const;
  Progress advance_blocks();
  bool try_stage();
  bool try_produce();
  bool try_take();
  void consume(const Block& block);
  void publish(const Block& block);
  void copy_own(const Block& block);
  void write(std::byte* to, const std::byte* from, std::size_t bytes) const;
  int contributor(int i) const;
  bool is_over();
  std::byte* staged(int from, int to, const Block& block) const;
  std::byte* published(int rank, const Block& block) const;
  // All peers of a role have brought a counter to a position; the others of this call's beginning,
  // where that is less.
  bool reached(Counter counter, std::uint64_t position, Role role, std::uint64_t& seen) const;
  [[gnu::cold]] std::vector<int> behind(Counter counter, std::uint64_t position, Role role) const;

  Endpoint& endpoint_;
  Board& board_;
  DirectCall call_;
  const Roles* roles_;
  std::size_t unit_;  // bytes of the array, or of a part
  std::uint64_t turn_, fingerprint_;
  std::size_t shot_bytes_ = 0;
  std::uint64_t shot_at_ = 0;
  Mode mode_ = Mode::entering;
  int come_ = 0;            // the ranks below this one have come, as far as they are awaited
  bool awaits_all_ = true;  // of those
  std::uint64_t input_begin_ = 0, output_begin_ = 0;  // of this call in the two stagings
  Block staging_, producing_, taking_, last_;
  bool input_is_mapped_ = false, output_is_mapped_ = false;
  bool is_cut_ = false;     // every chunk is a part of the whole array, and not of a part
  bool may_share_ = false;  // a reduce that all ranks work at, if all of them have mapped memory
  bool is_past_cache_ = false;  // the call's arrays do not fit into the caches: see support/copy.h
  std::uint64_t seen_staged_ = 0, seen_consumed_ = 0, seen_published_ = 0, seen_taken_ = 0;
  std::size_t block_bytes_ = 0;  // of the first block
  int lookahead_ = 0;
  int staged_ahead_ = 0, published_ahead_ = 0;  // blocks not yet consumed, and not yet taken
};

}  // namespace pycollective
